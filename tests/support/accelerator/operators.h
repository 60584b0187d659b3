// Operators of the pretend accelerator. Outputs get their shapes from the meta kernel and their memory at once; the CPU kernel
// is enqueued on views of the same bytes. The views do not keep the memory alive, as a kernel on a device does not.
//
// Views run on the host at once. Operators whose shapes depend on values make the host wait, as they do on CUDA.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <unordered_map>

#include "device.h"
#include "shapes.h"

namespace accelerator {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

// Kernels run below autograd, autocast and every mode of Python: they belong to no thread of the program.
struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard modes{DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::AutocastCPU,
                                                           DispatchKey::AutocastPrivateUse1, DispatchKey::FuncTorchDynamicLayerFrontMode,
                                                           DispatchKey::FuncTorchDynamicLayerBackMode})};
};

template <class F>
IValue map_tensors(const IValue& value, const F& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const auto& one : value.toTensorVector())
      changed.push_back(one.defined() ? change(one) : one);
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor> one : value.toOptionalTensorList())
      changed.push_back(one.has_value() && one->defined() ? std::optional<at::Tensor>(change(*one)) : one);
    return changed;
  }
  return value;
}

inline at::Tensor as_meta(const at::Tensor& tensor) {
  auto meta = at::Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// Views of the tensors of one call as host tensors.
class HostViews {
 public:
  at::Tensor of(const at::Tensor& tensor, bool may_be_released = false) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto& host = storages_[storage];
    if (!host) {
      c10::DataPtr data(storage->mutable_data(), c10::Device(c10::DeviceType::CPU));
      host = c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage->nbytes(), std::move(data),
                                                                 nullptr, /*resizable=*/false));
      devices_.emplace(host.unsafeGetStorageImpl(), tensor);
    }
    const auto needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
    TORCH_CHECK(may_be_released || tensor.numel() == 0 || needed <= storage->nbytes(),
                "an operator on the pretend accelerator uses memory that was released");
    auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(host), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      view.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (tensor.is_conj())
      view._set_conj(true);
    if (tensor.is_neg())
      view._set_neg(true);
    return view;
  }

  // The device tensor of a view that the host made of a view of ours.
  at::Tensor back(const at::Tensor& view) const {
    auto found = devices_.find(view.storage().unsafeGetStorageImpl());
    TORCH_CHECK(found != devices_.end(), "a view operator made new memory");
    const auto& base = found->second;
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), view.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
    return tensor;
  }

  bool made(const at::Tensor& view) const { return devices_.count(view.storage().unsafeGetStorageImpl()) > 0; }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::unordered_map<c10::StorageImpl*, at::Tensor> devices_;
};

inline at::Tensor empty_like_meta(const at::Tensor& meta, c10::Device device) {
  OnDevice here(device);
  return at::Tensor(at::detail::empty_strided_generic(meta.sizes(), meta.strides(), &device_allocator(),
                                                      DispatchKeySet(DispatchKey::PrivateUse1), meta.scalar_type()));
}

inline void set_default_generator(const at::Tensor& state) {
  auto generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> held(generator.mutex());
  generator.set_state(state);
}

inline at::Tensor default_generator() {
  auto generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> held(generator.mutex());
  return generator.get_state();
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), schema_(op.schema()), first_(stack->size() - schema_.arguments().size()) {}

  void run() {
    find_device();
    if (is_view())
      run_view();
    else if (waits_for_values() || !(keeps_shapes() || infer()))
      run_now();
    else
      run_later();
  }

 private:
  const c10::OperatorHandle& op_;
  Stack* stack_;
  const c10::FunctionSchema& schema_;
  const size_t first_;
  c10::Device device_{TYPE, current_device};
  Stack metas_;   // the arguments of the meta kernel
  Stack shapes_;  // its results
  bool resizes_ = false;

  IValue& argument(size_t i) { return (*stack_)[first_ + i]; }

  template <class F>
  void for_tensors(const IValue& value, const F& use) {
    map_tensors(value, [&](const at::Tensor& tensor) { use(tensor); return tensor; });
  }

  void find_device() {
    bool found = false, host = false;
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      if (argument(i).isDevice() && argument(i).toDevice().type() == TYPE && !found)
        device_ = Guard::whole(argument(i).toDevice());
      for_tensors(argument(i), [&](const at::Tensor& tensor) {
        if (!on_device(tensor)) {
          host = host || tensor.dim() > 0;
          return;
        }
        TORCH_CHECK(!found || tensor.device() == device_, "Expected all tensors to be on the same device, but found at least two devices, ",
                    device_, " and ", tensor.device(), "! (", op_.operator_name(), ")");
        device_ = tensor.device();
        found = true;
      });
    }
    const auto& name = schema_.operator_name().name;
    TORCH_CHECK(!(found && host) || name.find("index") != std::string::npos, "Expected all tensors to be on the same device, but found at ",
                "least two devices, ", device_, " and cpu! (", op_.operator_name(), ")");
  }

  bool is_view() const {
    for (const auto& one : schema_.returns())
      if (one.alias_info() != nullptr && !one.alias_info()->isWrite())
        return true;
    return false;
  }

  bool writes(size_t i) const {
    const auto* alias = schema_.arguments()[i].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  // Shapes or results on the host depend on values.
  bool waits_for_values() {
    static const std::set<std::string> known = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                                "aten::unique_consecutive", "aten::repeat_interleave", "aten::_local_scalar_dense",
                                                "aten::equal", "aten::is_nonzero", "aten::bincount", "aten::_ctc_loss"};
    const auto& name = schema_.operator_name().name;
    if (known.count(name) > 0)
      return true;
    for (const auto& one : schema_.returns())
      if (one.type()->kind() != c10::TypeKind::TensorType && one.type()->kind() != c10::TypeKind::ListType)
        return true;
    bool masks = false;
    if (name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_" || name == "aten::_unsafe_index")
      for (size_t i = 0; i < schema_.arguments().size(); ++i)
        if (argument(i).isOptionalTensorList())
          for_tensors(argument(i), [&](const at::Tensor& tensor) {
            masks = masks || tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
          });
    return masks;
  }

  // Every result is an argument that is changed in place, and none changes its size.
  bool keeps_shapes() {
    for (const auto& one : schema_.returns())
      if (one.alias_info() == nullptr || !one.alias_info()->isWrite())
        return false;
    for (const auto& one : schema_.arguments())
      if (one.is_out())
        return false;
    return !schema_.is_mutable() ? false : true;
  }

  bool infer() {
    // what the meta kernel returns as statistics is CUDA's, in shape or dtype
    static const std::set<std::string> by_running = {"aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm"};
    if (by_running.count(schema_.operator_name().name) > 0) {
      HostViews views;
      shapes_ = run_on_stand_ins(on_host(views));
      return true;
    }
    CallKey key(op_.operator_name());
    bool has_key = true;
    for (size_t i = 0; has_key && i < schema_.arguments().size(); ++i)
      has_key = key.add(argument(i));
    if (has_key && known_shapes().find(key.text(), shapes_))
      return true;
    std::unordered_map<c10::TensorImpl*, at::Tensor> made;
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      const IValue& value = argument(i);
      if (value.isDevice()) {
        metas_.emplace_back(c10::Device(c10::DeviceType::Meta));
      } else if (value.isGenerator()) {
        metas_.emplace_back();
      } else {
        metas_.push_back(map_tensors(value, [&](const at::Tensor& tensor) {
          if (!on_device(tensor) && tensor.dim() == 0)
            return tensor;
          auto& meta = made[tensor.unsafeGetTensorImpl()];
          if (!meta.defined())
            meta = as_meta(tensor);
          return meta;
        }));
      }
    }
    shapes_ = metas_;
    try {
      Below below;
      op_.callBoxed(&shapes_);
    } catch (const c10::NotImplementedError&) {
      return false;
    }
    for (size_t i = 0; i < schema_.arguments().size(); ++i)
      resizes_ = resizes_ || is_resized(i);
    if (has_key && !resizes_)
      known_shapes().keep(key.text(), shapes_);
    return true;
  }

  // Whether the meta kernel gave another size to what is written.
  bool is_resized(size_t i) {
    if (!writes(i) || !argument(i).isTensor() || !argument(i).toTensor().defined())
      return false;
    const auto& meta = metas_[i].toTensor();
    return meta.sizes() != argument(i).toTensor().sizes() || meta.strides() != argument(i).toTensor().strides();
  }

  // The arguments as the host's kernel takes them.
  Stack on_host(HostViews& views, bool may_be_released = false) {
    Stack host;
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      const IValue& value = argument(i);
      if (value.isDevice())
        host.emplace_back(c10::Device(c10::DeviceType::CPU));
      else
        host.push_back(map_tensors(value, [&](const at::Tensor& tensor) {
          if (on_device(tensor))
            return views.of(tensor, may_be_released);
          Below below;
          auto taken = tensor.clone();  // the value of a tensor on the host is read before the call returns
          if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
            taken.unsafeGetTensorImpl()->set_wrapped_number(true);
          return taken;
        }));
    }
    return host;
  }

  void finish(Stack results) {
    stack_->erase(stack_->begin() + static_cast<int64_t>(first_), stack_->end());
    for (auto& one : results)
      stack_->push_back(std::move(one));
  }

  void run_view() {
    HostViews views;
    Stack host = on_host(views, true);
    {
      Below below;
      op_.callBoxed(&host);
    }
    for (auto& one : host)
      one = map_tensors(one, [&](const at::Tensor& view) { return views.back(view); });
    finish(std::move(host));
  }

  // The argument that result number `i` is; -1: it is new.
  int64_t argument_of(size_t i) const {
    const auto* alias = schema_.returns()[i].alias_info();
    if (alias == nullptr)
      return -1;
    for (size_t k = 0; k < schema_.arguments().size(); ++k)
      if (const auto* given = schema_.arguments()[k].alias_info(); given != nullptr && *given == *alias)
        return static_cast<int64_t>(k);
    return -1;
  }

  void run_now() {
    scheduler().synchronize(scheduler().record(current_stream(device_.index())));
    HostViews views;
    Stack host = on_host(views);
    Stack given(stack_->begin() + static_cast<int64_t>(first_), stack_->end());
    {
      Below below;
      op_.callBoxed(&host);
    }
    for (size_t i = 0; i < host.size(); ++i) {
      if (const auto k = argument_of(i); k >= 0) {
        host[i] = given[static_cast<size_t>(k)];
        continue;
      }
      host[i] = map_tensors(host[i], [&](const at::Tensor& result) {
        auto tensor = empty_like_meta(result, device_);
        if (result.numel() > 0) {
          HostViews one;
          Below below;
          one.of(tensor).copy_(result);
        }
        return tensor;
      });
    }
    finish(std::move(host));
  }

  void run_later() {
    if (resizes_)
      resize_outputs();
    HostViews views;
    Stack host = on_host(views);
    Stack results;
    std::vector<at::Tensor> targets;  // of the results that are new, in order
    const size_t count = schema_.returns().size();
    for (size_t i = 0; i < count; ++i) {
      if (const auto k = argument_of(i); k >= 0) {
        results.push_back(argument(static_cast<size_t>(k)));
        continue;
      }
      results.push_back(map_tensors(shapes_[i], [&](const at::Tensor& meta) {
        auto tensor = empty_like_meta(meta, device_);
        targets.push_back(views.of(tensor));
        return tensor;
      }));
    }
    at::Tensor random;
    if (op_.hasTag(at::Tag::nondeterministic_seeded)) {
      random = default_generator();
      Stack drawn = host;
      for (auto& value : host)
        if (value.isGenerator())
          value = value.toGenerator().clone();
      draw(drawn);
    }
    std::vector<bool> fresh;
    for (size_t i = 0; i < count; ++i)
      fresh.push_back(argument_of(i) < 0);
    const double moved = bytes(host, true) + bytes(results, false), operations_done = operations(host);
    scheduler().enqueue(current_stream(device_.index()), schema_.name().substr(6), [op = op_, host, targets, fresh, random]() mutable {
      Below below;
      at::Tensor before;
      if (random.defined()) {
        before = default_generator();
        set_default_generator(random);
      }
      op.callBoxed(&host);
      if (before.defined())
        set_default_generator(before);
      size_t next = 0;
      for (size_t i = 0; i < fresh.size(); ++i)
        if (fresh[i])
          map_tensors(host[i], [&](const at::Tensor& result) {
            const auto& target = targets.at(next++);
            TORCH_CHECK(result.sizes() == target.sizes() && result.scalar_type() == target.scalar_type(), op.operator_name(),
                        ": the meta kernel knows another shape or dtype");
            target.copy_(result);
            return result;
          });
    }, operations_done, moved);
    finish(std::move(results));
  }

  // Multiplications and additions of a product of matrices: the last two that it reads are (.., m, k) and (.., k, n).
  double operations(const Stack& host) const {
    const auto name = schema_.name().substr(6);
    if (name != "mm" && name != "addmm" && name != "bmm" && name != "baddbmm")
      return 0;
    std::vector<at::Tensor> matrices;
    for (size_t i = 0; i < host.size(); ++i)
      if (host[i].isTensor() && host[i].toTensor().dim() >= 2 && !schema_.arguments()[i].is_out())
        matrices.push_back(host[i].toTensor());
    return 2.0 * matrices.at(matrices.size() - 2).numel() * matrices.back().size(-1);
  }

  // Bytes of all values; of arguments, without those that are only written. Numbers count nothing.
  double bytes(const Stack& values, bool are_arguments) const {
    double total = 0;
    for (size_t i = 0; i < values.size(); ++i)
      if (!are_arguments || !schema_.arguments()[i].is_out())
        map_tensors(values[i], [&](const at::Tensor& tensor) {
          total += tensor.dim() > 0 ? static_cast<double>(tensor.nbytes()) : 0;
          return tensor;
        });
    return total;
  }

  // Draws what the kernel will draw, so that the generator is where the program expects it.
  void draw(const Stack& host) { run_on_stand_ins(host); }

  // Runs the host's kernel on tensors with the same shapes and other values.
  Stack run_on_stand_ins(const Stack& host) {
    Stack copy;
    Below below;
    for (const auto& value : host)
      copy.push_back(map_tensors(value, [](const at::Tensor& tensor) {
        auto stand_in = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
        return stand_in.fill_(tensor.is_floating_point() ? 0.5 : 1);
      }));
    op_.callBoxed(&copy);
    return copy;
  }

  // Kernels may resize what they are given as out=.
  void resize_outputs() {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      if (!is_resized(i))
        continue;
      auto tensor = argument(i).toTensor();
      const auto& meta = metas_[i].toTensor();
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(), tensor.storage_offset());
      grow(tensor);
    }
  }

 public:
  static void grow(const at::Tensor& tensor) {
    const auto needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (tensor.numel() > 0 && needed > storage->nbytes())
      resize_storage(storage, needed);
  }
};

inline void call(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

}  // namespace accelerator
