"""From a model's name and options to a launch plan: the one path that every verb and the LLM class take."""

from __future__ import annotations

from interlock.demo import resolve_model
from interlock.demo.shapes import refuse_weights_of_shape, shape_folder
from interlock.models.card_reader import read_model_card
from interlock.options import Options
from interlock.plan.facts import MachineFacts, probe
from interlock.plan.join import Declarations
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.resolve import resolve


def plan_launch(model: str, options: Options, facts: MachineFacts | None = None) -> LaunchPlan:
    """Resolve ``options`` for ``model`` on this machine (or on the machine that ``facts`` describe).

    Raises:
        Refusal: the options do not fit each other, the model or the machine.
        CheckpointError: the folder is not a checkpoint that can be served.
    """
    if not options.is_set("model"):
        options = options.changed({"model": model})
    folder = shape_folder(model) or resolve_model(model, source=options.text("demo_source"))
    refuse_weights_of_shape(model, options)
    facts = facts or machine_facts()
    return resolve(options, read_model_card(folder), facts, model_path=folder)


def machine_facts() -> MachineFacts:
    """Facts of this machine, with whatever a declaration looks at."""
    declared = Declarations.registered()
    return probe(packages=declared.packages(), libraries=declared.libraries(), variables=declared.variables())
