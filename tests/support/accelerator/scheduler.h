// Streams of the pretend accelerator: queues of work, and a scheduler that decides which queue advances.
//
// There are no threads. Work runs inside the call of whichever host thread waits, queries or enqueues, in an order that the seed
// decides. So a run is repeated by its seed.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "record.h"

namespace accelerator {

enum class Mode { Eager = 0, Lazy = 1, Random = 2, Starve = 3 };

struct Stream;

// A rendezvous of one piece of work on each of several streams: it runs when every stream has come to it.
struct Rendezvous {
  int64_t key;
  int members;
  int arrived = 0;
  bool over = false;
  bool aborted = false;
  std::function<void()> move;
  std::function<bool()> ready;  // if the other members are in other processes: whether they have all come
  std::vector<std::pair<Stream*, uint64_t>> places;  // of each member that has launched it: stream and position
};

struct Work {
  std::function<void()> run;                // empty for waits
  Stream* waits_for = nullptr;              // this work is over when that stream has come to `until`
  uint64_t until = 0;
  std::shared_ptr<Rendezvous> rendezvous;   // `run` is done on arrival; the work is over when the rendezvous is
  bool arrived = false;
};

struct Stream {
  int64_t id;
  int device;
  std::deque<Work> queue;
  uint64_t enqueued = 0;
  uint64_t done = 0;
  std::map<std::string, int64_t> counts;  // of kernels and allocations since `configure`, by name
  bool being_advanced = false;
  bool listed = false;  // in the scheduler's list of streams that have had work in this run
};

// A position in a stream, taken by `record`.
struct Event {
  Stream* stream = nullptr;
  uint64_t position = 0;
  bool over() const { return stream == nullptr || stream->done >= position; }
};

// Called without the lock when the host waits for a rendezvous that a peer has not launched. False: it never will.
using Blocked = int (*)(int64_t key);

class Scheduler {
 public:
  std::recursive_mutex lock;
  Blocked blocked = nullptr;
  std::map<int, int64_t> host_waits;  // of each device
  Record log;  // of what the hosts enqueue and wait for

  void configure(Mode mode, uint64_t seed) {
    std::lock_guard<std::recursive_mutex> held(lock);
    mode_ = mode;
    random_.seed(seed);
    starved_ = static_cast<int64_t>(seed % 8);
    first_id_ = last_id_;
    host_waits.clear();
    for (auto& [place, stream] : streams_)
      stream->counts.clear();
    error_.clear();
  }

  Stream* stream(int device, int64_t id) {
    std::lock_guard<std::recursive_mutex> held(lock);
    auto& found = streams_[{device, id}];
    if (!found) {
      found = std::make_unique<Stream>();
      found->id = id;
      found->device = device;
    }
    list(found.get());
    return found.get();
  }

  Stream* make(int device) {
    std::lock_guard<std::recursive_mutex> held(lock);
    stream(device, 0);  // the default stream is the first one in every run
    return stream(device, ++last_id_[device]);
  }

  // `name`: of the kernel, by which it is counted; none if no program asked for it.
  void enqueue(Stream* stream, const std::string& name, std::function<void()> run, double operations = 0, double bytes = 0) {
    std::lock_guard<std::recursive_mutex> held(lock);
    if (!name.empty())
      ++stream->counts[name];
    log.add("kernel", stream->device, stream->id, stream->enqueued + 1, name.empty() ? "-" : name.c_str(), operations, bytes);
    Work work;
    work.run = std::move(run);
    push(stream, std::move(work));
  }

  void wait(Stream* stream, const Event& event) {
    std::lock_guard<std::recursive_mutex> held(lock);
    if (event.stream == nullptr || event.stream == stream || (event.over() && !log.on))
      return;
    log.add("wait", stream->device, stream->id, stream->enqueued + 1, event.stream->device, event.stream->id, event.position);
    Work work;
    work.waits_for = event.stream;
    work.until = event.position;
    push(stream, std::move(work));
  }

  Event record(Stream* stream) {
    std::lock_guard<std::recursive_mutex> held(lock);
    return Event{stream, stream->enqueued};
  }

  // Adds the part of one stream to a rendezvous. `arrive` runs when the stream has come to it.
  void meet(Stream* stream, const std::shared_ptr<Rendezvous>& rendezvous, std::function<void()> arrive) {
    std::lock_guard<std::recursive_mutex> held(lock);
    Work work;
    work.run = std::move(arrive);
    work.rendezvous = rendezvous;
    rendezvous->places.emplace_back(stream, stream->enqueued + 1);
    if (rendezvous->aborted)
      work.rendezvous = nullptr;
    push(stream, std::move(work));
  }

  // Whether an event is over. Something that it needs runs, so that asking again and again ends.
  bool query(const Event& event) {
    std::lock_guard<std::recursive_mutex> held(lock);
    const bool over = event.over();
    if (!over) {
      int64_t key = -1;
      if (mode_ == Mode::Random && random_() % 2)
        return false;
      advance(event.stream, event.stream->done + 1, key);
    }
    return over;
  }

  // The host waits. `counts`: whether the program asked for it. Raises the first error of a kernel.
  void synchronize(const Event& event, bool counts = true) {
    std::unique_lock<std::recursive_mutex> held(lock);
    if (counts && event.stream != nullptr)
      ++host_waits[event.stream->device];
    int64_t key = -1;
    if (mode_ == Mode::Random)
      some(random_() % 8);
    while (!event.over() && !advance(event.stream, event.position, key)) {
      held.unlock();
      const bool goes_on = blocked != nullptr && blocked(key);
      held.lock();
      if (!goes_on) {
        abort(key);
        throw std::runtime_error("the pretend accelerator waits for a collective that no peer will launch");
      }
    }
    if (event.stream != nullptr)
      log.add("host", event.stream->device, event.stream->id, event.position);
    raise();
  }

  void synchronize_device(int device) {
    std::vector<Event> ends;
    {
      std::lock_guard<std::recursive_mutex> held(lock);
      ++host_waits[device];
      for (auto* stream : order_)
        if (stream->device == device)
          ends.push_back(Event{stream, stream->enqueued});
    }
    for (auto& end : ends)
      synchronize(end, false);
  }

  // Ends a collective without its result: the streams that wait for it go on.
  void abort(int64_t key) {
    std::lock_guard<std::recursive_mutex> held(lock);
    for (auto* stream : order_)
      for (auto& work : stream->queue)
        if (work.rendezvous && work.rendezvous->key == key)
          work.rendezvous->over = work.rendezvous->aborted = true;
  }

  // Whether a collective has been launched and is not over.
  bool in_flight(int64_t key) {
    std::lock_guard<std::recursive_mutex> held(lock);
    for (auto* stream : order_)
      for (auto& work : stream->queue)
        if (work.rendezvous && work.rendezvous->key == key && !work.rendezvous->over)
          return true;
    return false;
  }

  // Every queue advances by one piece of work, as a device does while no host looks.
  void pump() {
    std::lock_guard<std::recursive_mutex> held(lock);
    sweep(false);
  }

  void reset() {
    std::lock_guard<std::recursive_mutex> held(lock);
    for (auto* stream : order_) {
      stream->queue.clear();
      stream->done = stream->enqueued;
      stream->listed = false;
    }
    order_.clear();
    last_id_.clear();  // the next run has the same streams again
    error_.clear();
  }

  // What has been counted on the streams of a device, one a line: stream, name, number.
  std::string counts(int device) {
    std::lock_guard<std::recursive_mutex> held(lock);
    std::string text;
    for (auto* stream : order_)
      if (stream->device == device)
        for (auto& [name, number] : stream->counts)
          text += std::to_string(stream->id) + " " + name + " " + std::to_string(number) + "\n";
    return text;
  }

  void start_log(bool on) {
    std::lock_guard<std::recursive_mutex> held(lock);
    log.start(on);
  }

  // The host of a device has come to a place of its program.
  void mark(int device, int number) {
    std::lock_guard<std::recursive_mutex> held(lock);
    log.add("mark", device, number);
  }

  int64_t queued(int device) {
    std::lock_guard<std::recursive_mutex> held(lock);
    int64_t count = 0;
    for (auto* stream : order_)
      if (stream->device == device)
        count += static_cast<int64_t>(stream->queue.size());
    return count;
  }

 private:
  std::map<std::pair<int, int64_t>, std::unique_ptr<Stream>> streams_;
  std::vector<Stream*> order_;  // those of this run
  std::map<int, int64_t> last_id_;
  std::map<int, int64_t> first_id_;  // of each device, the last stream made before `configure`
  std::mt19937_64 random_;
  Mode mode_ = Mode::Eager;
  int64_t starved_ = 0;
  std::string error_;

  void list(Stream* stream) {
    if (!stream->listed)
      order_.push_back(stream);
    stream->listed = true;
  }

  void push(Stream* stream, Work work) {
    list(stream);
    stream->queue.push_back(std::move(work));
    ++stream->enqueued;
    switch (mode_) {
      case Mode::Eager:
        while (sweep(false)) {
        }
        break;
      case Mode::Lazy:
        break;
      case Mode::Random:
        some(random_() % 3);
        break;
      case Mode::Starve:
        while (sweep(true)) {
        }
        break;
    }
  }

  // Runs the first work of each stream that can go on. Returns whether there was any.
  bool sweep(bool starving) {
    bool any = false;
    for (size_t i = 0; i < order_.size(); ++i)
      if (!order_[i]->queue.empty() && !(starving && starves(order_[i])))
        any = step(order_[i]) || any;
    return any;
  }

  bool starves(const Stream* stream) {
    return stream->id == (starved_ == 0 ? 0 : first_id_[stream->device] + starved_);
  }

  void some(uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      std::vector<Stream*> waiting;
      for (auto* stream : order_)
        if (!stream->queue.empty() && !stream->being_advanced)
          waiting.push_back(stream);
      const size_t first = waiting.empty() ? 0 : random_() % waiting.size();
      for (size_t k = 0; k < waiting.size(); ++k)
        if (step(waiting[(first + k) % waiting.size()]))
          break;
    }
  }

  // Runs the first work of a stream if nothing holds it up. Returns whether anything changed.
  bool step(Stream* stream) {
    Work& work = stream->queue.front();
    std::function<void()> run;
    if (work.waits_for != nullptr) {
      if (work.waits_for->done < work.until)
        return false;
    } else if (work.rendezvous) {
      auto rendezvous = work.rendezvous;
      bool moved = false;
      if (!work.arrived) {
        work.arrived = moved = true;
        attempt(work.run);
        ++rendezvous->arrived;
      }
      if (!rendezvous->over && rendezvous->arrived == rendezvous->members && (!rendezvous->ready || rendezvous->ready())) {
        attempt(rendezvous->move);
        rendezvous->over = moved = true;
      }
      if (!rendezvous->over)
        return moved;
    } else {
      run = std::move(work.run);
    }
    stream->queue.pop_front();
    if (run)
      attempt(run);
    ++stream->done;
    return true;
  }

  void attempt(const std::function<void()>& run) {
    try {
      run();
    } catch (const std::exception& failure) {
      if (error_.empty())
        error_ = failure.what();
    }
  }

  void raise() {
    if (!error_.empty()) {
      std::string text = "a kernel of the pretend accelerator failed earlier: " + error_;
      error_.clear();
      throw std::runtime_error(text);
    }
  }

  // Runs what `stream` needs to come to `position`, and nothing else. False: the rendezvous `key` waits for a peer's launch.
  bool advance(Stream* stream, uint64_t position, int64_t& key) {
    if (stream->done >= position)
      return true;
    if (stream->being_advanced) {
      key = -2;
      throw std::runtime_error("two streams of the pretend accelerator wait for each other for ever");
    }
    struct Mark {
      Stream* stream;
      explicit Mark(Stream* one) : stream(one) { stream->being_advanced = true; }
      ~Mark() { stream->being_advanced = false; }
    } mark(stream);
    while (stream->done < position) {
      Work& work = stream->queue.front();
      if (work.waits_for != nullptr) {
        if (!advance(work.waits_for, work.until, key))
          return false;
      } else if (work.rendezvous && !work.rendezvous->over) {
        auto rendezvous = work.rendezvous;
        step(stream);
        if (!rendezvous->over) {
          if (rendezvous->ready || static_cast<int>(rendezvous->places.size()) < rendezvous->members) {
            key = rendezvous->key;
            return false;
          }
          for (auto& [other, place] : rendezvous->places)
            if (other != stream && !rendezvous->over) {
              if (!advance(other, place - 1, key))
                return false;
              if (!other->queue.empty() && other->done < place)
                step(other);
            }
        }
        continue;
      }
      step(stream);
    }
    return true;
  }
};

Scheduler& scheduler();

}  // namespace accelerator
