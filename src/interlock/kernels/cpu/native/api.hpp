// Types and status codes of the C interface; kept in step with library.py.
#pragma once

#include "vector.hpp"

namespace interlock {

enum Type { FLOAT32 = 0, BFLOAT16 = 1 };

enum Status {
  OK = 0,
  BAD_POSITION = 1,
  BAD_SLOT = 2,
  BAD_QUERY_START = 3,
  BAD_KV_LEN = 4,
  BAD_PAGE = 5,
  BAD_OFFSETS = 6,
  BAD_SOURCE = 7,
  BAD_TARGET = 8,
};

template <class F>
inline int with_type(int type, F&& body) {
  return type == BFLOAT16 ? body(bf16{}) : body(float{});
}

}  // namespace interlock
