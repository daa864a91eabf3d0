// One-sided dispatch and combine between the processes of one host. Where everything lies is decided in
// shape.py and passed in; the fields of Link are kept in step with link.py.
//
// Flags hold the number of the last step whose data is complete. A mailbox exists twice: a rank may enter
// step g + 1 while a peer still reads its mail of step g, but not step g + 2, because finishing the dispatch
// of g + 1 takes that peer's flag of g + 1. Results exist once: a peer writes those of step g + 1 only after
// the owner's flag of g + 1, which the owner sets when it is done with those of g.

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t CACHE_LINE = 64;
constexpr int MAX_RANKS = 64;

enum Status { OK = 0, WAITING = 1, BAD_ID = 2, STALE = 3, OVERFLOW_ROWS = 4 };

struct Link {
  int64_t ranks, rank, top_k, num_experts, local_experts;
  int64_t row_bytes, scale_bytes, result_bytes;
  int64_t dispatch_flags, return_flags, mailboxes, mailbox_bytes, mailbox_rows, mailbox_scales, results;
  uint8_t* segments[MAX_RANKS];
  const int32_t* owner;
  const int32_t* local_id;
};

struct Header {
  int64_t step, rows, lanes;
};

struct Lane {
  int32_t row, expert, home;
  float weight;
};
static_assert(sizeof(Lane) == 16, "LANE_BYTES in shape.py");

struct Origin {
  int32_t source, home, unused;
};
static_assert(sizeof(Origin) == 12, "ORIGIN_BYTES in shape.py");

using Flag = std::atomic<int64_t>;
static_assert(sizeof(Flag) == 8 && Flag::is_always_lock_free, "flags are plain words in shared memory");

Flag& flag(uint8_t* segment, int64_t flags, int64_t writer) {
  return *reinterpret_cast<Flag*>(segment + flags + writer * CACHE_LINE);
}

uint8_t* mailbox(const Link& link, int64_t owner, int64_t step, int64_t writer) {
  return link.segments[owner] + link.mailboxes + ((step & 1) * link.ranks + writer) * link.mailbox_bytes;
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spin, then yield the core, then sleep in short naps: a peer may be busy for a while.
bool wait_for(Flag& flag, int64_t step, int64_t deadline) {
  for (int i = 0; i < 2000; ++i) {
    if (flag.load(std::memory_order_acquire) >= step) return true;
    relax();
  }
  const int64_t patience = now_ns() + 2000000;
  for (;;) {
    for (int i = 0; i < 16; ++i) {
      if (flag.load(std::memory_order_acquire) >= step) return true;
      sched_yield();
    }
    const int64_t now = now_ns();
    if (now > deadline) return flag.load(std::memory_order_acquire) >= step;
    if (now > patience) {
      const timespec nap = {0, 50000};
      nanosleep(&nap, nullptr);
    }
  }
}

Status wait_for_all(const Link& link, int64_t flags, int64_t step, int64_t slice_ns, int64_t* late) {
  const int64_t deadline = now_ns() + slice_ns;
  for (int64_t source = 0; source < link.ranks; ++source) {
    if (!wait_for(flag(link.segments[link.rank], flags, source), step, deadline)) {
      *late = source;
      return WAITING;
    }
  }
  return OK;
}

}  // namespace

extern "C" {

// Write the tokens of this rank into the mailboxes of all ranks. Checks every id before it writes anything;
// *culprit is the flat index of a bad one.
int interlock_a2a_send(const Link* link_, int64_t step, int64_t tokens, const uint8_t* hidden, int64_t stride,
                       const uint8_t* scales, const int64_t* ids, const float* weights, int64_t* culprit) {
  const Link& link = *link_;
  const int64_t lanes = tokens * link.top_k;
  for (int64_t i = 0; i < lanes; ++i) {
    if (ids[i] < -1 || ids[i] >= link.num_experts) {
      *culprit = i;
      return BAD_ID;
    }
  }
  uint8_t* box[MAX_RANKS];
  int64_t rows[MAX_RANKS] = {}, filled[MAX_RANKS] = {}, last[MAX_RANKS];
  for (int64_t r = 0; r < link.ranks; ++r) {
    box[r] = mailbox(link, r, step, link.rank);
    last[r] = -1;
  }
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t lane = token * link.top_k; lane < (token + 1) * link.top_k; ++lane) {
      if (ids[lane] < 0) continue;
      const int32_t to = link.owner[ids[lane]];
      if (last[to] != token) {
        last[to] = token;
        std::memcpy(box[to] + link.mailbox_rows + rows[to] * link.row_bytes, hidden + token * stride, link.row_bytes);
        if (link.scale_bytes)
          std::memcpy(box[to] + link.mailbox_scales + rows[to] * link.scale_bytes,
                      scales + token * link.scale_bytes, link.scale_bytes);
        ++rows[to];
      }
      reinterpret_cast<Lane*>(box[to] + CACHE_LINE)[filled[to]++] = {
          static_cast<int32_t>(rows[to] - 1), link.local_id[ids[lane]], static_cast<int32_t>(lane), weights[lane]};
    }
  }
  for (int64_t i = 0; i < link.ranks; ++i) {
    const int64_t r = (link.rank + 1 + i) % link.ranks;
    *reinterpret_cast<Header*>(box[r]) = {step, rows[r], filled[r]};
    flag(link.segments[r], link.dispatch_flags, link.rank).store(step, std::memory_order_release);
  }
  return OK;
}

// Wait for everyone's mail, then copy the rows to the experts that want them. slab_rows > 0 gives each expert
// that many rows (masked), else segments start at multiples of `alignment` (contiguous). counts, psum: [L].
int interlock_a2a_receive(const Link* link_, int64_t step, int64_t slice_ns, int64_t slab_rows, int64_t alignment,
                          int64_t max_rows, uint8_t* rows, uint8_t* scales, float* weights, Origin* origins,
                          int32_t* counts, int32_t* psum, int64_t* total_rows, int64_t* late) {
  const Link& link = *link_;
  const Status status = wait_for_all(link, link.dispatch_flags, step, slice_ns, late);
  if (status != OK) return status;
  std::memset(counts, 0, link.local_experts * sizeof(int32_t));
  for (int64_t source = 0; source < link.ranks; ++source) {
    const uint8_t* box = mailbox(link, link.rank, step, source);
    const Header& header = *reinterpret_cast<const Header*>(box);
    if (header.step != step) {
      *late = source;
      return STALE;
    }
    const Lane* lanes = reinterpret_cast<const Lane*>(box + CACHE_LINE);
    for (int64_t i = 0; i < header.lanes; ++i) ++counts[lanes[i].expert];
  }
  int64_t next = 0;
  for (int64_t e = 0; e < link.local_experts; ++e) {
    const int64_t start = slab_rows ? e * slab_rows : (next + alignment - 1) / alignment * alignment;
    if (slab_rows && counts[e] > slab_rows) return OVERFLOW_ROWS;
    psum[e] = static_cast<int32_t>(start);
    next = start + counts[e];
  }
  *total_rows = slab_rows ? link.local_experts * slab_rows : (next + alignment - 1) / alignment * alignment;
  if (*total_rows > max_rows) return OVERFLOW_ROWS;
  for (int64_t source = 0; source < link.ranks; ++source) {
    const uint8_t* box = mailbox(link, link.rank, step, source);
    const int64_t count = reinterpret_cast<const Header*>(box)->lanes;
    const Lane* lanes = reinterpret_cast<const Lane*>(box + CACHE_LINE);
    for (int64_t i = 0; i < count; ++i) {
      const Lane& lane = lanes[i];
      const int64_t at = psum[lane.expert]++;
      std::memcpy(rows + at * link.row_bytes, box + link.mailbox_rows + lane.row * link.row_bytes, link.row_bytes);
      if (link.scale_bytes)
        std::memcpy(scales + at * link.scale_bytes, box + link.mailbox_scales + lane.row * link.scale_bytes,
                    link.scale_bytes);
      weights[at] = lane.weight;
      origins[at] = {static_cast<int32_t>(source), lane.home, 0};
    }
  }
  return OK;
}

// Write the experts' results into the homes of their lanes.
int interlock_a2a_return(const Link* link_, int64_t step, const uint8_t* results, const Origin* origins,
                         const int32_t* counts, const int32_t* psum) {
  const Link& link = *link_;
  for (int64_t e = 0; e < link.local_experts; ++e) {
    for (int64_t at = psum[e] - counts[e]; at < psum[e]; ++at) {
      uint8_t* home = link.segments[origins[at].source] + link.results;
      std::memcpy(home + origins[at].home * link.result_bytes, results + at * link.result_bytes, link.result_bytes);
    }
  }
  for (int64_t i = 0; i < link.ranks; ++i) {
    const int64_t r = (link.rank + 1 + i) % link.ranks;
    flag(link.segments[r], link.return_flags, link.rank).store(step, std::memory_order_release);
  }
  return OK;
}

// Wait until every rank has written its results for this rank's tokens.
int interlock_a2a_collect(const Link* link, int64_t step, int64_t slice_ns, int64_t* late) {
  return wait_for_all(*link, link->return_flags, step, slice_ns, late);
}

}  // extern "C"
