// Memory of the pretend accelerator: blocks that belong to the stream they were allocated on, as in torch's caching allocator.
//
// A block that is released can be had again by its own stream at once, because that stream's work runs in order. Streams that
// were named by record_stream must have come to the place of the release first, and the host must have noticed that. At each
// allocation on a stream all that was released to it is overwritten with 0xFF (NaN), by that stream, in its order: any of it
// might have been handed out.
#pragma once

#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>

#include "scheduler.h"

namespace accelerator {

struct Block {
  char* data;
  size_t size;
  int device;
  Stream* stream;
  std::set<Stream*> users;
  int64_t counted = 0;  // bytes that the tensor in it asked for; torch's allocator would split the block
};

struct Memory {
  int64_t bytes = 0;
  int64_t peak = 0;
  int64_t limit = -1;
  int64_t allocations = 0;
  int64_t fails_at = -1;
  std::map<int64_t, int64_t> by_stream;
  std::map<Stream*, std::multimap<size_t, Block*>> free;
  std::map<Stream*, std::vector<Block*>> unpoisoned;
  std::vector<std::pair<Block*, std::vector<Event>>> pending;
};

class Allocator {
 public:
  Memory& memory(int device) { return memories_[device]; }

  // The block, or null if the limit or the allocation that has to fail is reached, or the host has no such memory.
  // `again`: the second attempt, after all streams have been waited for.
  Block* allocate(int device, Stream* stream, size_t wanted, bool again) {
    std::lock_guard<std::recursive_mutex> held(scheduler().lock);
    auto& memory = memories_[device];
    const size_t size = (wanted + 511) / 512 * 512;
    if (memory.fails_at >= 0 && (again ? memory.allocations - 1 : memory.allocations++) == memory.fails_at)
      return nullptr;
    notice(memory);
    if (memory.limit >= 0 && memory.bytes + static_cast<int64_t>(size) > memory.limit)
      return nullptr;
    for (auto* block : std::exchange(memory.unpoisoned[stream], {}))
      scheduler().enqueue(stream, "", [block] { std::memset(block->data, 0xFF, block->size); });
    auto& free = memory.free[stream];
    auto found = free.lower_bound(size);
    Block* block;
    if (found != free.end() && found->first <= 2 * size) {
      found = std::prev(free.upper_bound(found->first));  // the one that was released last
      block = found->second;
      free.erase(found);
    } else {
      auto* data = static_cast<char*>(std::aligned_alloc(512, size));
      if (data == nullptr)
        return nullptr;
      std::memset(data, 0xFF, size);
      block = new Block{data, size, device, stream, {}};
    }
    ++stream->counts["allocation"];
    block->counted = static_cast<int64_t>(size);
    memory.bytes += block->counted;
    memory.by_stream[stream->id] += block->counted;
    memory.peak = std::max(memory.peak, memory.bytes);
    return block;
  }

  void release(Block* block) {
    std::lock_guard<std::recursive_mutex> held(scheduler().lock);
    auto& memory = memories_[block->device];
    memory.bytes -= block->counted;
    memory.by_stream[block->stream->id] -= block->counted;
    if (block->users.empty()) {
      give_back(memory, block);
      return;
    }
    std::vector<Event> ends;
    for (auto* stream : block->users)
      ends.push_back(scheduler().record(stream));
    block->users.clear();
    memory.pending.emplace_back(block, std::move(ends));
  }

  // Nothing is queued any longer, and a next run has streams of its own: what was released to those of this one is freed.
  void settle() {
    std::lock_guard<std::recursive_mutex> held(scheduler().lock);
    for (auto& [device, memory] : memories_) {
      notice(memory);
      memory.unpoisoned.clear();
      for (auto& [stream, blocks] : std::exchange(memory.free, {}))
        for (auto& [size, block] : blocks) {
          std::free(block->data);
          delete block;
        }
    }
  }

  void used_by(Block* block, Stream* stream) {
    std::lock_guard<std::recursive_mutex> held(scheduler().lock);
    if (stream != block->stream)
      block->users.insert(stream);
  }

 private:
  std::map<int, Memory> memories_;

  static void give_back(Memory& memory, Block* block) {
    memory.unpoisoned[block->stream].push_back(block);
    memory.free[block->stream].emplace(block->size, block);
  }

  static void notice(Memory& memory) {
    auto pending = std::move(memory.pending);
    memory.pending.clear();
    for (auto& one : pending) {
      bool over = true;
      for (auto& end : one.second)
        over = over && end.over();
      if (over)
        give_back(memory, one.first);
      else
        memory.pending.push_back(std::move(one));
    }
  }
};

Allocator& allocator();

}  // namespace accelerator
