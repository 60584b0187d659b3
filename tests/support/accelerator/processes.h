// Collectives between the pretend devices of several processes, which share a folder. The input of a rank travels as a file.
#pragma once

#include <array>
#include <cstdio>
#include <fstream>

#include "collectives.h"

namespace accelerator {

// One collective as one rank launches it. Where ranks launch it differently nobody goes on, as with NCCL.
class Shared {
 public:
  Shared(std::string place, int members, Part part, Kind kind, int source, at::ScalarType dtype)
      : place_(std::move(place)), members_(members), part_(part), kind_(kind), source_(source), dtype_(dtype),
        head_{static_cast<int64_t>(kind), part.count, static_cast<int64_t>(dtype), source} {}

  void arrive() {
    const auto path = path_of(part_.member);
    {
      std::ofstream file(path + ".new", std::ios::binary);
      file.write(reinterpret_cast<const char*>(head_.data()), sizeof(head_));
      file.write(part_.input, input_bytes());
    }
    TORCH_CHECK(std::rename((path + ".new").c_str(), path.c_str()) == 0, "cannot write ", path);
    if (kind_ != Kind::Broadcast || part_.member != source_)
      std::memset(part_.output, 0xFF, own_is_inside() ? 0 : output_bytes());
  }

  // Whether every rank has launched the same.
  bool ready() const {
    for (int member = 0; member < members_; ++member) {
      std::ifstream file(path_of(member), std::ios::binary);
      Head head;
      if (!file.read(reinterpret_cast<char*>(head.data()), sizeof(head)) || head != head_)
        return false;
    }
    return true;
  }

  void move() {
    Collective all;
    std::vector<std::string> outputs(members_);
    all.inputs.resize(members_);
    for (int member = 0; member < members_; ++member) {
      std::ifstream file(path_of(member), std::ios::binary);
      file.seekg(sizeof(Head));
      all.inputs[member].resize(input_bytes());
      file.read(all.inputs[member].data(), input_bytes());
      outputs[member].resize(output_bytes());
    }
    for (int member = 0; member < members_; ++member) {
      char* output = member == part_.member ? part_.output : outputs[member].data();
      all.parts.push_back(Part{member, all.inputs[member].data(), output, part_.count});
    }
    accelerator::move(all, kind_, source_, dtype_);
  }

 private:
  using Head = std::array<int64_t, 4>;
  const std::string place_;
  const int members_;
  const Part part_;
  const Kind kind_;
  const int source_;
  const at::ScalarType dtype_;
  const Head head_;

  std::string path_of(int member) const { return place_ + "." + std::to_string(member); }
  int64_t chunk_bytes() const { return part_.count * static_cast<int64_t>(c10::elementSize(dtype_)); }
  int64_t input_bytes() const { return chunk_bytes() * (kind_ == Kind::ReduceScatter || kind_ == Kind::AllToAll ? members_ : 1); }
  int64_t output_bytes() const { return chunk_bytes() * (kind_ == Kind::AllGather || kind_ == Kind::AllToAll ? members_ : 1); }
  // The output of a reduce-scatter may be a part of its input, which later kernels may read.
  bool own_is_inside() const {
    return kind_ == Kind::ReduceScatter && part_.output >= part_.input && part_.output < part_.input + input_bytes();
  }
};

inline void launch_between_processes(int64_t key, const std::string& place, int members, Part part, Kind kind, int source,
                                     at::ScalarType dtype, Stream* stream) {
  std::lock_guard<std::recursive_mutex> held(scheduler().lock);
  auto shared = std::make_shared<Shared>(place, members, part, kind, source, dtype);
  auto rendezvous = std::make_shared<Rendezvous>();
  rendezvous->key = key;
  rendezvous->members = 1;
  rendezvous->ready = [shared] { return shared->ready(); };
  rendezvous->move = [shared] { shared->move(); };
  scheduler().meet(stream, rendezvous, [shared] { shared->arrive(); });
}

}  // namespace accelerator
