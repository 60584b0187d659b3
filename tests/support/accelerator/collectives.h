// Collectives between the devices of one process. Every rank enqueues its part on a stream of its communicator; the data moves
// when all streams have come to it. Until then the outputs of a rank that has arrived are garbage, as while NCCL writes them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>

#include "operators.h"

namespace accelerator {

enum class Kind { AllGather = 0, ReduceScatter = 1, Sum = 2, Max = 3, Broadcast = 4, AllToAll = 5 };

struct Part {
  int member;
  char* input;
  char* output;
  int64_t count;  // elements of this member's chunk, or of the tensor where there are no chunks
};

struct Collective {
  std::shared_ptr<Rendezvous> rendezvous;
  std::vector<Part> parts;
  std::vector<std::string> inputs;  // of each part, its input when its stream arrived, if the output is in the same place
};

inline std::map<int64_t, std::shared_ptr<Collective>>& rendezvous() {
  static auto* all = new std::map<int64_t, std::shared_ptr<Collective>>();
  return *all;
}

// The sum of rows (W, C) in the order of fsdp.comm.pairwise_sum: neighbours are added until one is left.
inline at::Tensor pairwise(at::Tensor parts) {
  const auto dtype = parts.scalar_type();
  if (parts.is_floating_point() && parts.element_size() < 4)
    parts = parts.to(at::kFloat);
  auto count = parts.size(0);
  while (count > 2 && count % 2 == 0) {
    count /= 2;
    parts = parts.view({count, 2, -1}).select(1, 0) + parts.view({count, 2, -1}).select(1, 1);
  }
  while (count > 2) {
    const auto paired = count / 2 * 2;
    parts = parts.clone();
    parts.slice(0, 0, paired, 2).add_(parts.slice(0, 1, paired, 2));
    parts = parts.slice(0, 0, count, 2).contiguous();
    count = (count + 1) / 2;
  }
  auto total = count == 2 ? parts[0] + parts[1] : parts[0];
  return total.to(dtype);
}

inline void move(Collective& all, Kind kind, int source, at::ScalarType dtype) {
  Below below;
  auto& parts = all.parts;
  std::sort(parts.begin(), parts.end(), [](const Part& one, const Part& other) { return one.member < other.member; });
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  const auto world = static_cast<int64_t>(parts.size());
  const auto tensor = [&](void* data, int64_t count) { return at::from_blob(data, {count}, at::TensorOptions().dtype(dtype)); };
  if (kind == Kind::AllGather) {
    std::string gathered;
    for (const auto& part : parts)
      gathered.append(part.input, part.count * size);
    for (const auto& part : parts)
      std::memcpy(part.output, gathered.data(), gathered.size());
  } else if (kind == Kind::ReduceScatter) {
    std::vector<at::Tensor> sums;
    for (int64_t rank = 0; rank < world; ++rank) {
      std::vector<at::Tensor> rows;
      for (const auto& part : parts)
        rows.push_back(tensor(part.input + rank * part.count * size, part.count));
      sums.push_back(pairwise(at::stack(rows)));
    }
    for (int64_t rank = 0; rank < world; ++rank)
      tensor(parts[rank].output, parts[rank].count).copy_(sums[rank]);
  } else if (kind == Kind::Broadcast) {
    for (const auto& part : parts)
      if (part.member != source)
        std::memcpy(part.output, parts.at(source).input, part.count * size);
  } else if (kind == Kind::AllToAll) {
    for (int64_t to = 0; to < world; ++to)
      for (int64_t from = 0; from < world; ++from) {
        const auto chunk = parts[to].count * size;
        std::memcpy(parts[to].output + from * chunk, parts[from].input + to * chunk, chunk);
      }
  } else {
    std::vector<at::Tensor> rows;
    for (const auto& part : parts)
      rows.push_back(tensor(all.inputs.at(part.member).data(), part.count));
    auto stacked = at::stack(rows);
    auto total = kind == Kind::Sum ? pairwise(stacked) : stacked.amax(0);
    for (const auto& part : parts)
      tensor(part.output, part.count).copy_(total);
  }
}

inline void launch(int64_t key, int members, Part part, Kind kind, int source, at::ScalarType dtype, Stream* stream) {
  std::lock_guard<std::recursive_mutex> held(scheduler().lock);
  auto& all = rendezvous()[key];
  if (!all) {
    all = std::make_shared<Collective>();
    all->rendezvous = std::make_shared<Rendezvous>();
    all->rendezvous->key = key;
    all->rendezvous->members = members;
    all->inputs.resize(members);
    all->rendezvous->move = [all = all.get(), kind, source, dtype] { move(*all, kind, source, dtype); };
  }
  all->parts.push_back(part);
  const auto kept = all;
  if (static_cast<int>(kept->parts.size()) == members)
    rendezvous().erase(key);
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  const double others = members - 1, bytes_of_part = static_cast<double>(part.count * size);
  const bool reduces_all = kind == Kind::Sum || kind == Kind::Max;
  const double received =
      kind == Kind::Broadcast ? bytes_of_part : reduces_all ? 2 * others / members * bytes_of_part : others * bytes_of_part;
  scheduler().log.add("collective", stream->device, stream->id, stream->enqueued + 1, key, members, static_cast<int>(kind), received);
  scheduler().meet(stream, kept->rendezvous, [kept, part, kind, source, members, size] {
    const auto bytes = part.count * size;
    if (kind == Kind::AllGather) {
      for (int rank = 0; rank < members; ++rank)
        if (rank != part.member)
          std::memset(part.output + rank * bytes, 0xFF, bytes);
    } else if (kind == Kind::ReduceScatter) {
      if (part.output + bytes <= part.input || part.input + members * bytes <= part.output)
        std::memset(part.output, 0xFF, bytes);
    } else if (kind == Kind::Broadcast) {
      if (part.member != source)
        std::memset(part.output, 0xFF, bytes);
    } else if (kind == Kind::AllToAll) {
      std::memset(part.output, 0xFF, members * bytes);
    } else {
      kept->inputs[part.member].assign(part.input, bytes);
      std::memset(part.output, 0xFF, bytes);
    }
  });
}

}  // namespace accelerator
