// Virtual time: how long a run would take if kernels and links had given speeds and the host took no time. No clock is read.
#pragma once

#include <algorithm>

namespace accelerator {

struct Speeds {
  double operations = 0;  // of multiplications and additions in products of matrices, a second
  double bytes = 0;       // that a kernel reads and writes, a second
  double link = 0;        // bytes that a rank receives from the others, a second, by one collective at a time
  bool known() const { return operations > 0; }
  double of_kernel(double operations_done, double bytes_moved) const {
    return known() ? std::max(operations_done / operations, bytes_moved / bytes) : 0;
  }
  double of_collective(double received) const { return known() ? received / link : 0; }
};

}  // namespace accelerator
