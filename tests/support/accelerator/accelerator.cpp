// A pretend accelerator for tests: torch's device type PrivateUse1, whose memory is the host's and whose work runs later.
// See docs/development/pretend-accelerator.md. It is no GPU, and says nothing about the speed of one.

#include <ATen/ops/stack.h>

#include "collectives.h"
#include "operators.h"
#include "processes.h"

namespace accelerator {

Scheduler& scheduler() {
  static auto* one = new Scheduler();  // never destroyed: tensors outlive static objects
  return *one;
}

Allocator& allocator() {
  static auto* one = new Allocator();
  return *one;
}

namespace {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- operators that do not go through the fallback ----------------------------------------------

at::Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice here(device.value_or(c10::Device(TYPE, current_device)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice here(device.value_or(c10::Device(TYPE, current_device)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator(),
                                           DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format.has_value())
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  Call::grow(self);
  return self;
}

at::Tensor& set_storage_offset(at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto given = C10_AS_INTARRAYREF_SLOW(stride);
  std::vector<int64_t> strides(given.begin(), given.end());
  if (strides.empty() && !sizes.empty()) {
    strides.assign(sizes.size(), 1);
    for (auto i = static_cast<int64_t>(sizes.size()) - 2; i >= 0; --i)
      strides[i] = strides[i + 1] * std::max<int64_t>(sizes[i + 1], 1);
  }
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset.guard_int(__FILE__, __LINE__));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, c10::SymInt(count), {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

// Copies between host and device, and on a device. A host copy waits, unless it is non_blocking and the host memory is pinned.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0)
    return self;
  const auto device = on_device(self) ? self.device() : source.device();
  const double moved = self.nbytes() + source.nbytes();
  auto* stream = current_stream(device.index());
  auto views = std::make_shared<HostViews>();
  const auto host_view = [&](const at::Tensor& tensor) { return on_device(tensor) ? views->of(tensor) : tensor; };
  const auto copy = [](const at::Tensor& to, const at::Tensor& from) {
    Below below;
    to.copy_(from);
  };
  // tensors of Python are not kept in the queue: their last reference would need the interpreter
  const auto plain = [](const at::Tensor& tensor) {
    auto same = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    same.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return same;
  };
  if (on_device(self) && on_device(source)) {
    if (self.device() != source.device()) {
      auto* other = current_stream(source.device().index());
      scheduler().wait(stream, scheduler().record(other));
      scheduler().enqueue(stream, "copy_", [=, to = host_view(self), from = host_view(source)] { copy(to, from); }, 0, moved);
      scheduler().wait(other, scheduler().record(stream));
      return self;
    }
    scheduler().enqueue(stream, "copy_", [=, to = host_view(self), from = host_view(source)] { copy(to, from); }, 0, moved);
    return self;
  }
  const auto& host = on_device(self) ? source : self;
  const bool waits = !non_blocking || !is_pinned(host.storage().data());
  if (on_device(self)) {
    at::Tensor from;
    {
      Below below;
      from = is_pinned(host.storage().data()) ? plain(source) : source.clone();  // pageable memory is read before the call returns
    }
    scheduler().enqueue(stream, "copy_", [=, to = host_view(self)] { copy(to, from); }, 0, moved);
    if (!non_blocking)
      scheduler().synchronize(scheduler().record(stream));
    return self;
  }
  scheduler().enqueue(stream, "copy_", [=, to = plain(self), from = host_view(source)] { copy(to, from); }, 0, moved);
  if (waits)
    scheduler().synchronize(scheduler().record(stream));
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& self, bool non_blocking) {
  auto target = self;
  return copy_(target, source, non_blocking);
}

int64_t fused_sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // the composite one, of plain operators
}

}  // namespace
}  // namespace accelerator

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&accelerator::call>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &accelerator::empty_memory_format);
  m.impl("empty_strided", &accelerator::empty_strided);
  m.impl("resize_", &accelerator::resize);
  m.impl("set_.source_Storage_storage_offset", &accelerator::set_storage_offset);
  m.impl("set_.source_Storage", &accelerator::set_storage);
  m.impl("set_.source_Tensor", &accelerator::set_tensor);
  m.impl("record_stream", &accelerator::record_stream);
  m.impl("copy_", &accelerator::copy_);
  m.impl("_copy_from", &accelerator::copy_from);
  m.impl("_fused_sdp_choice", &accelerator::fused_sdp_choice);
  // composite kernels that would look for a kernel by the type of the device: they run whole on the host
  for (const char* name : {"convolution", "convolution_backward", "native_dropout", "native_dropout_backward", "native_layer_norm",
                           "native_group_norm", "silu_backward", "mish_backward", "addr"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&accelerator::call>());
}

// ---- what Python calls through ctypes -----------------------------------------------------------

namespace {
thread_local std::string failure;

template <class F>
int guarded(const F& run) {
  try {
    run();
    return 0;
  } catch (const std::exception& reason) {
    failure = reason.what();
    return 1;
  }
}
}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace accelerator;

EXPORT void pa_start() {
  c10::SetAllocator(TYPE, &device_allocator(), 100);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
EXPORT const char* pa_failure() { return failure.c_str(); }
EXPORT void pa_configure(int mode, uint64_t seed) { scheduler().configure(static_cast<Mode>(mode), seed); }
EXPORT void pa_reset() {
  scheduler().reset();
  allocator().settle();
  rendezvous().clear();
}
EXPORT void pa_on_blocked(Blocked blocked) { scheduler().blocked = blocked; }
EXPORT int pa_device_count() { return DEVICES; }
EXPORT int pa_current_device() { return current_device; }
EXPORT void pa_set_device(int device) { current_device = static_cast<c10::DeviceIndex>(device); }
EXPORT int pa_synchronize(int device) {
  return guarded([&] { scheduler().synchronize_device(device); });
}
EXPORT void pa_record(int on) { scheduler().start_log(on != 0); }
EXPORT void pa_mark(int device, int number) { scheduler().mark(device, number); }
EXPORT const char* pa_recorded() { return scheduler().log.text(); }
EXPORT int64_t pa_queued(int device) { return scheduler().queued(device); }
EXPORT int64_t pa_host_waits(int device) { return scheduler().host_waits[device]; }
EXPORT const char* pa_counts(int device) {
  static thread_local std::string text;
  text = scheduler().counts(device);
  return text.c_str();
}
EXPORT int64_t pa_bytes(int device) { return allocator().memory(device).bytes; }
EXPORT int64_t pa_bytes_of_stream(int device, int64_t stream) { return allocator().memory(device).by_stream[stream]; }
EXPORT int64_t pa_peak(int device) { return allocator().memory(device).peak; }
EXPORT void pa_reset_peak(int device) { allocator().memory(device).peak = allocator().memory(device).bytes; }
EXPORT void pa_limit(int device, int64_t bytes) { allocator().memory(device).limit = bytes; }
EXPORT int64_t pa_allocations(int device) { return allocator().memory(device).allocations; }
EXPORT void pa_fail_at(int device, int64_t number) {
  allocator().memory(device).allocations = 0;
  allocator().memory(device).fails_at = number;
}
EXPORT void pa_launch(int64_t key, int members, int member, int kind, int source, int dtype, int device, int64_t stream, void* input,
                      void* output, int64_t count) {
  launch(key, members, Part{member, static_cast<char*>(input), static_cast<char*>(output), count}, static_cast<Kind>(kind), source,
         static_cast<at::ScalarType>(dtype), scheduler().stream(device, stream));
}
EXPORT void pa_launch_between_processes(int64_t key, const char* place, int members, int member, int kind, int source, int dtype,
                                        int device, int64_t stream, void* input, void* output, int64_t count) {
  launch_between_processes(key, place, members, Part{member, static_cast<char*>(input), static_cast<char*>(output), count},
                           static_cast<Kind>(kind), source, static_cast<at::ScalarType>(dtype), scheduler().stream(device, stream));
}
EXPORT int pa_in_flight(int64_t key) { return scheduler().in_flight(key); }
EXPORT void pa_pump() { scheduler().pump(); }
EXPORT void pa_abort(int64_t key) { scheduler().abort(key); }
