// torch's operators for the simulated device: each enqueues torch's kernel for the host on the current stream.
//
// The kernel runs later, on the thread of the stream, over tensors at the address by which the runtime touches the memory of
// the device. Nothing keeps that memory meanwhile, as on a device: only its address is noted. The shapes of results are those
// of torch's meta kernels. Where there are none, or they depend on data, the call waits for the stream, and for the result.
#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <mutex>

extern "C" {
void* sim_touchable(void* address);
int sim_enqueue(void* stream, const char* what, const uintptr_t* begins, const size_t* bytes, const int* writes, int num,
                void (*run)(void*), void (*drop)(void*), void* data);
void sim_operator_failed(int device, const char* text);
}

namespace {

using c10::DispatchKey;
using c10::IValue;
using Stack = std::vector<IValue>;

// A tensor of the device, without its memory being kept.
struct Place {
  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool is_conj, is_neg;
};

Place place_of(const at::Tensor& tensor) {
  return {tensor.numel() ? tensor.data_ptr() : nullptr, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(),
          tensor.is_conj(), tensor.is_neg()};
}

at::Tensor on_host(const Place& place) {
  at::Tensor made;
  const auto options = at::TensorOptions().dtype(place.dtype).device(at::kCPU);
  if (place.data)
    made = at::from_blob(sim_touchable(place.data), place.sizes, place.strides, options);
  else
    made = at::empty_strided(place.sizes, place.strides, options);
  made._set_conj(place.is_conj);
  made._set_neg(place.is_neg);
  return made;
}

size_t extent_of(const at::Tensor& tensor) {
  if (!tensor.numel()) return 0;
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return static_cast<size_t>(last + 1) * tensor.element_size();
}

bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// Call `of` with each tensor in a value, and make a like value of what it returns.
template <class F>
IValue mapped(const IValue& value, const F& of) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(of(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(tensor.defined() ? of(tensor) : tensor);
    return made;
  }
  if (value.isList() && value.toListRef().size() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<at::Tensor>> made;
    for (const IValue& one : value.toListRef())
      made.push_back(one.isTensor() && one.toTensor().defined() ? std::optional<at::Tensor>(of(one.toTensor())) : std::nullopt);
    return made;
  }
  return value;
}

template <class F>
void each_tensor(const IValue& value, const F& tell) {
  mapped(value, [&](const at::Tensor& tensor) {
    tell(tensor);
    return tensor;
  });
}

struct Accesses {
  std::vector<uintptr_t> begins;
  std::vector<size_t> bytes;
  std::vector<int> writes;
  void add(const at::Tensor& tensor, bool is_written) {
    if (!is_on_device(tensor) || !tensor.numel()) return;
    begins.push_back(reinterpret_cast<uintptr_t>(tensor.data_ptr()));
    bytes.push_back(extent_of(tensor));
    writes.push_back(is_written);
  }
};

// What a stream runs.
struct Work {
  c10::OperatorHandle op;
  Stack arguments;            // tensors of the device are numbers in `places`
  std::vector<Place> places;
  std::vector<Place> results;  // to which the kernel's own results are copied
  size_t num_returns;
  int device;
  std::optional<uint64_t> seed;
};

// A tensor argument stands in `arguments` as a meta tensor whose storage offset is its number in `places`.
at::Tensor number(size_t n) {
  return at::empty({0}, at::TensorOptions().device(at::kMeta).dtype(at::kByte)).set_requires_grad(false).as_strided({0}, {1}, static_cast<int64_t>(n));
}

IValue argument_on_host(const Work& work, const IValue& value) {
  if (value.isDevice()) return IValue(at::Device(at::kCPU));
  if (value.isGenerator()) return IValue();
  return mapped(value, [&](const at::Tensor& tensor) {
    return tensor.is_meta() ? on_host(work.places[tensor.storage_offset()]) : tensor;
  });
}

void run(void* given) {
  Work& work = *static_cast<Work*>(given);
  try {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    Stack stack;
    const auto& parameters = work.op.schema().arguments();
    for (size_t i = 0; i < work.arguments.size(); ++i) {
      IValue value = argument_on_host(work, work.arguments[i]);
      if (work.seed && parameters[i].name() == "generator") {
        at::Generator made = at::detail::createCPUGenerator(*work.seed);
        value = IValue(made);
      }
      stack.push_back(std::move(value));
    }
    work.op.callBoxed(&stack);
    std::vector<at::Tensor> made;
    for (const IValue& value : stack) each_tensor(value, [&](const at::Tensor& tensor) { made.push_back(tensor); });
    if (!work.results.empty()) {
      TORCH_CHECK(made.size() == work.results.size(), "a result is missing");
      for (size_t i = 0; i < made.size(); ++i) {
        at::Tensor into = on_host(work.results[i]);
        TORCH_CHECK(into.sizes() == made[i].sizes(), "the meta kernel gives ", into.sizes(), ", that of the host ", made[i].sizes());
        into.copy_(made[i]);
      }
    }
  } catch (const std::exception& error) {
    const std::string text = toString(work.op.operator_name()) + ": " + error.what();
    sim_operator_failed(work.device, text.substr(0, 2000).c_str());
  }
}

void drop(void* given) { delete static_cast<Work*>(given); }

std::optional<uint64_t> next_seed(const c10::FunctionSchema& schema, const Stack& arguments, at::DeviceIndex device) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (schema.arguments()[i].name() != "generator") continue;
    at::Generator given = arguments[i].isGenerator() ? arguments[i].toGenerator() : at::cuda::detail::getDefaultCUDAGenerator(device);
    std::lock_guard<std::mutex> lock(given.mutex());
    auto* generator = at::check_generator<at::CUDAGeneratorImpl>(given);
    const uint64_t offset = generator->get_offset();
    generator->set_offset(offset + 4);
    return generator->current_seed() * 0x9E3779B97F4A7C15ull + offset;
  }
  return std::nullopt;
}

void wait_for_stream(const c10::cuda::CUDAStream& stream) { C10_CUDA_CHECK(cudaStreamSynchronize(stream)); }

at::Tensor like_on_meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// Do it at once: what its result looks like is not known before.
void run_now(const c10::OperatorHandle& op, Stack* stack, const Stack& arguments, const c10::cuda::CUDAStream& stream,
             std::optional<uint64_t> seed) {
  wait_for_stream(stream);
  Work work{op, {}, {}, {}, 0, stream.device_index(), seed};
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  Stack on;
  const auto& parameters = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool writes = parameters[i].alias_info() && parameters[i].alias_info()->isWrite();
    IValue value = arguments[i].isDevice() ? IValue(at::Device(at::kCPU)) : arguments[i].isGenerator() ? IValue() : mapped(arguments[i], [&](const at::Tensor& tensor) {
      if (!is_on_device(tensor)) return tensor;
      at::Tensor host = on_host(place_of(tensor));
      if (writes) {
        host = host.clone();  // the kernel may give it another size
        written.emplace_back(tensor, host);
      }
      return host;
    });
    if (seed && parameters[i].name() == "generator") value = IValue(at::detail::createCPUGenerator(*seed));
    on.push_back(std::move(value));
  }
  {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    op.callBoxed(&on);
  }
  for (auto& [tensor, host] : written) {
    if (tensor.sizes() != host.sizes()) tensor.resize_(host.sizes());
    tensor.copy_(host);
  }
  size_t next = 0;
  for (IValue& value : on)
    stack->push_back(mapped(value, [&](const at::Tensor& made) {
      for (auto& [tensor, host] : written)
        if (host.is_same(made)) return tensor;
      ++next;
      return made.to(at::Device(at::kCUDA, stream.device_index()));
    }));
}

bool depends_on_data(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out", "aten::_unique", "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::equal",
      "aten::is_set_to", "aten::_assert_async", "aten::repeat_interleave.Tensor", "aten::histc", "aten::_histogramdd_bin_edges"};
  return names.count(name) > 0;
}

void on_device(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t num = schema.arguments().size();
  Stack arguments(stack->end() - static_cast<ptrdiff_t>(num), stack->end());
  stack->erase(stack->end() - static_cast<ptrdiff_t>(num), stack->end());
  std::optional<at::Device> device;
  for (const IValue& value : arguments) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!device && is_on_device(tensor)) device = tensor.device();
    });
    if (value.isDevice() && !device && value.toDevice().is_cuda()) device = value.toDevice();
  }
  const c10::cuda::OptionalCUDAGuard guard(device);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const std::string name = toString(op.operator_name());
  const auto seed = next_seed(schema, arguments, stream.device_index());

  // Which arguments are written to, and do the results stand for them?
  std::vector<bool> writes(num);
  bool writes_any = false;
  for (size_t i = 0; i < num; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    writes[i] = alias && alias->isWrite();
    writes_any = writes_any || writes[i];
  }
  if (depends_on_data(name)) return run_now(op, stack, arguments, stream, seed);

  // What it returns: the arguments that it writes to, in their order, or new tensors.
  Stack returned;
  std::vector<at::Tensor> results;
  const bool has_out = std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const auto& a) { return a.is_out(); });
  const bool gives_new = std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& r) { return !r.alias_info(); });
  if (has_out || gives_new) {
    Stack on_meta;
    std::vector<std::pair<at::Tensor, at::Tensor>> outs;
    try {
      c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      for (size_t i = 0; i < num; ++i) {
        if (arguments[i].isDevice()) {
          on_meta.emplace_back(at::Device(at::kMeta));
        } else if (arguments[i].isGenerator()) {
          on_meta.emplace_back();
        } else {
          on_meta.push_back(mapped(arguments[i], [&](const at::Tensor& tensor) {
            if (!is_on_device(tensor)) return tensor.dim() == 0 ? tensor : like_on_meta(tensor);
            at::Tensor meta = like_on_meta(tensor);
            if (writes[i]) outs.emplace_back(tensor, meta);
            return meta;
          }));
        }
      }
      op.callBoxed(&on_meta);
    } catch (const c10::NotImplementedError&) {
      return run_now(op, stack, arguments, stream, seed);
    }
    for (auto& [tensor, meta] : outs)
      if (tensor.sizes() != meta.sizes()) tensor.resize_(meta.sizes());
    for (const IValue& value : on_meta)
      returned.push_back(mapped(value, [&](const at::Tensor& meta) {
        for (auto& [tensor, of_out] : outs)
          if (of_out.is_same(meta)) return tensor;
        at::Tensor made = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(at::Device(at::kCUDA, stream.device_index())));
        results.push_back(made);
        return made;
      }));
  } else {
    for (size_t i = 0; i < num && returned.size() < schema.returns().size(); ++i)
      if (writes[i]) returned.push_back(arguments[i]);
  }

  auto work = std::make_unique<Work>(Work{op, {}, {}, {}, schema.returns().size(), stream.device_index(), seed});
  Accesses accesses;
  for (size_t i = 0; i < num; ++i)
    work->arguments.push_back(mapped(arguments[i], [&](const at::Tensor& tensor) {
      if (!is_on_device(tensor)) return tensor.clone();
      accesses.add(tensor, writes[i]);
      work->places.push_back(place_of(tensor));
      return number(work->places.size() - 1);
    }));
  for (const at::Tensor& result : results) {
    accesses.add(result, true);
    work->results.push_back(place_of(result));
  }
  Work* given = work.release();
  sim_enqueue(stream.stream(), name.c_str(), accesses.begins.data(), accesses.bytes.data(), accesses.writes.data(),
              static_cast<int>(accesses.begins.size()), run, drop, given);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  for (IValue& value : returned) stack->push_back(std::move(value));
}

// Copies within a device that are not one of bytes are made by a kernel; all others as torch makes them.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (!is_on_device(self) || !is_on_device(source) || self.device() != source.device() || !self.numel())
    return at::native::copy_(self, source, non_blocking);
  const bool is_of_bytes = self.dtype() == source.dtype() && self.sizes() == source.sizes() && self.is_conj() == source.is_conj() &&
                           self.is_neg() == source.is_neg() && self.is_contiguous() && source.is_contiguous();
  if (is_of_bytes) return at::native::copy_(self, source, non_blocking);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  Stack stack{self, source, non_blocking};
  on_device(op, &stack);
  return self;
}

// Kept as torch has them: what allocates, views, or copies bytes, and what reads one number.
bool is_kept(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::empty.memory_format", "aten::empty_strided", "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold",
      "aten::view_as_real", "aten::view_as_complex", "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset",
      "aten::set_.source_Tensor", "aten::record_stream", "aten::_local_scalar_dense", "aten::resize_", "aten::is_pinned",
      "aten::_pin_memory", "aten::copy_", "aten::_efficientzerotensor", "aten::set_data", "aten::view.dtype"};
  return names.count(name) > 0;
}

std::unique_ptr<torch::Library>& library() {
  static auto& made = *new std::unique_ptr<torch::Library>;
  return made;
}

}  // namespace

// Register all; returns their number.
extern "C" int sim_register_operators() {
  auto& made = library();
  if (made) return 0;
  // torch warns of each kernel that takes the place of another.
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  made = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  const auto of_host = c10::Dispatcher::singleton().getRegistrationsForDispatchKey(DispatchKey::CPU);
  std::set<std::string> have;
  for (const auto& name : of_host) have.insert(toString(name));
  int num = 0;
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(DispatchKey::CUDA)) {
    const std::string text = toString(name);
    if (name.name.rfind("aten::", 0) != 0 || is_kept(text)) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema()) continue;
    if (!have.count(text) && !op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) && !op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd))
      continue;
    made->impl(text.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_device>());
    ++num;
  }
  made->impl("copy_", TORCH_FN(copy_));
  return num + 1;
}
