// What torch asks of a device: its allocator, its current device and stream, events, pinned memory, generators.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace accelerator {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 8;

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local int64_t current_streams[DEVICES] = {};

inline Stream* current_stream(int device) { return scheduler().stream(device, current_streams[device]); }
inline Stream* of(const c10::Stream& stream) { return scheduler().stream(stream.device_index(), stream.id()); }

// ---- memory -------------------------------------------------------------------------------------

inline void release_block(void* block) { allocator().release(static_cast<Block*>(block)); }

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device device(TYPE, current_device);
    if (size == 0)
      return c10::DataPtr(nullptr, device);
    auto* stream = current_stream(current_device);
    auto* block = accelerator::allocator().allocate(current_device, stream, size, false);
    if (block == nullptr) {
      // torch's allocator waits for all that record_stream holds back before it gives up
      scheduler().synchronize_device(current_device);
      block = accelerator::allocator().allocate(current_device, stream, size, true);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "the pretend accelerator ", device, " is out of memory: tried to allocate ",
                     size, " bytes beside ", accelerator::allocator().memory(current_device).bytes);
    return c10::DataPtr(block->data, block, &release_block, device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    scheduler().enqueue(current_stream(current_device), "copy_", [=] { std::memcpy(to, from, size); });
  }
};

inline DeviceAllocator& device_allocator() {
  static DeviceAllocator one;
  return one;
}

inline std::mutex pinned_lock;
inline std::set<const void*> pinned;

struct PinnedAllocator final : c10::Allocator {
  static void release(void* context) {
    auto* memory = static_cast<c10::DataPtr*>(context);
    {
      std::lock_guard<std::mutex> held(pinned_lock);
      pinned.erase(memory->get());
    }
    delete memory;
  }
  c10::DataPtr allocate(size_t size) override {
    auto* memory = new c10::DataPtr(c10::GetCPUAllocator()->allocate(size));
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned.insert(memory->get());
    return c10::DataPtr(memory->get(), memory, &release, c10::Device(c10::DeviceType::CPU));
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { default_copy_data(to, from, size); }
};

inline bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> held(pinned_lock);
  return pinned.count(data) > 0;
}

struct OnDevice {
  c10::DeviceIndex before = current_device;
  explicit OnDevice(c10::Device device) {
    if (device.index() >= 0)
      current_device = device.index();
  }
  ~OnDevice() { current_device = before; }
};

inline void resize_storage(c10::StorageImpl* storage, size_t size) {
  OnDevice here(storage->device());
  if (size == 0) {
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
    storage->set_nbytes(0);
    return;
  }
  auto fresh = device_allocator().allocate(size);
  const size_t kept = std::min(size, storage->nbytes());
  if (kept > 0 && storage->data() != nullptr)
    device_allocator().copy_data(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(size);
}

// ---- streams and events -------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(TYPE, current_device); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0)
      current_device = device.index();
  }
  static c10::Device whole(c10::Device device) {
    return c10::Device(TYPE, device.index() < 0 ? current_device : device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    device = whole(device);
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, whole(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    device = whole(device);
    return c10::Stream(c10::Stream::UNSAFE, device, scheduler().make(device.index())->id);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr)
      *event = new Event();
    *static_cast<Event*>(*event) = scheduler().record(of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr)
      scheduler().wait(of(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || scheduler().query(*static_cast<Event*>(event)); }
  bool queryStream(const c10::Stream& stream) const override { return scheduler().query(scheduler().record(of(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override { scheduler().synchronize(scheduler().record(of(stream))); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr)
      scheduler().synchronize(*static_cast<Event*>(event));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { scheduler().synchronize_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get_deleter() == &release_block)
      allocator().used_by(static_cast<Block*>(data.get_context()), of(stream));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : std::exchange(current_device, device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator one;
    return &one;
  }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(TYPE, current_device); }
  // one generator serves the host and the device, so that a program draws the same numbers on both
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage.unsafeGetStorageImpl(), size);
  }
};

}  // namespace accelerator
