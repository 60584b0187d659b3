// What the meta kernels of torch have said before. Most of them are Python functions and take a millisecond.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>

namespace accelerator {

// A call as a key: the operator, the forms of its tensors and the values of its other arguments.
class CallKey {
 public:
  explicit CallKey(const c10::OperatorName& name) { text_ << name.name << '.' << name.overload_name; }

  // Adds an argument. False: results may depend on more than what a key can hold.
  bool add(const c10::IValue& value) {
    text_ << '|';
    if (value.isNone() || value.isGenerator() || value.isDevice())
      return true;
    if (value.isTensor())
      return add_tensor(value.toTensor());
    if (value.isTensorList()) {
      for (const auto& one : value.toTensorVector())
        if (!add_tensor(one))
          return false;
      return true;
    }
    if (value.isInt() || value.isDouble() || value.isBool() || value.isIntList() || value.isDoubleList() || value.isBoolList() ||
        value.isString()) {
      text_ << value.tagKind() << ' ' << std::hexfloat << value;
      return true;
    }
    return false;
  }

  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;

  bool add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      text_ << 'u';
      return true;
    }
    const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (tensor.device().type() == c10::DeviceType::CPU && !number)
      return false;  // its value may decide
    text_ << static_cast<int>(tensor.scalar_type()) << number << tensor.is_conj() << tensor.is_neg() << tensor.sizes() << tensor.strides();
    return true;
  }
};

class KnownShapes {
 public:
  bool find(const std::string& key, torch::jit::Stack& results) {
    std::lock_guard<std::mutex> held(lock_);
    const auto found = known_.find(key);
    if (found != known_.end())
      results = found->second;
    return found != known_.end();
  }

  void keep(const std::string& key, const torch::jit::Stack& results) {
    std::lock_guard<std::mutex> held(lock_);
    if (known_.size() < 100000)
      known_.emplace(key, results);
  }

 private:
  std::mutex lock_;
  std::unordered_map<std::string, torch::jit::Stack> known_;
};

inline KnownShapes& known_shapes() {
  static auto* one = new KnownShapes();
  return *one;
}

}  // namespace accelerator
