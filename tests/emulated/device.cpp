// An accelerator of host memory, as torch's PrivateUse1. Kernels run at once, on the CPU, in the order in which the host launches them;
// what is checked is whether their *streams* order them (streams.h).
//
// Real are: the autograd engine, DDP's reducer, `ivalue::Future`, everything that asks a device guard for streams and events. Strict as CUDA
// is: kernels take no tensors of the CPU but scalars, copies from memory that is not pinned make the host wait.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>

#include "streams.h"

namespace {

using emulated::Device;
using emulated::Event;
using emulated::Region;
using emulated::Stream;
using emulated::Touch;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr auto KEY = c10::DispatchKey::PrivateUse1;
// There are two devices. All tensors are on the second; the first, on which nothing is, is the current one of threads that have not chosen.
constexpr c10::DeviceIndex DEVICES = 2, HOME = 1;
constexpr Stream FIRST_NEW_STREAM = 100, FIRST_POOL_STREAM = 1000, ELSEWHERE = 5000;

Device& device() {
  static Device* const only = new Device;  // never destroyed: tensors may outlive everything
  return *only;
}
thread_local Stream current_stream = 0;
thread_local c10::DeviceIndex current_device = 0;

// What is launched by this thread goes into a graph.
struct Graph;
thread_local std::shared_ptr<Graph> capture;
thread_local bool replays = false;
void forbidden_in_a_capture(const std::string& what);
void require_the_captured_stream(Stream stream);

bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == KIND; }

Region region_of(const at::Tensor& t) {
  char* begin = static_cast<char*>(t.data_ptr());
  if (!t.numel()) return {begin, begin};
  int64_t extent = 1;
  for (int64_t d = 0; d < t.dim(); ++d) extent += (t.size(d) - 1) * t.stride(d);
  return {begin, begin + extent * t.itemsize()};
}

// --- memory -------------------------------------------------------------------------------------------------------------------

char* allocate_here(size_t bytes);

struct Memory final : c10::Allocator {
  static void release(void* memory) { device().release(static_cast<char*>(memory)); }
  c10::DataPtr allocate(size_t bytes) override {
    char* memory = allocate_here(bytes);
    return {memory, memory, &release, c10::Device(KIND, HOME)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory)

// Memory of the host from which copies do not make it wait.
struct PinnedMemory final : c10::Allocator {
  static std::mutex& mutex() {
    static auto* const only = new std::mutex;
    return *only;
  }
  static std::set<const void*>& all() {
    static auto* const only = new std::set<const void*>;
    return *only;
  }
  static void release(void* memory) {
    std::lock_guard<std::mutex> lock(mutex());
    all().erase(memory);
    std::free(memory);
  }
  static bool holds(const void* memory) {
    std::lock_guard<std::mutex> lock(mutex());
    return all().count(memory) > 0;
  }
  c10::DataPtr allocate(size_t bytes) override {
    forbidden_in_a_capture("memory of the host is pinned");
    std::lock_guard<std::mutex> lock(mutex());
    void* memory = std::aligned_alloc(512, (bytes / 512 + 1) * 512);
    all().insert(memory);
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;

// --- streams and events, as torch asks for them -------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream wrap(Stream s, c10::DeviceIndex device = HOME) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device), s); }
  static c10::DeviceIndex index(c10::Device device) { return device.has_index() ? device.index() : current_device; }

  c10::DeviceType type() const override { return KIND; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Device exchangeDevice(c10::Device device) const override { return {KIND, std::exchange(current_device, index(device))}; }
  c10::Device getDevice() const override { return {KIND, current_device}; }
  void setDevice(c10::Device device) const override { current_device = index(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index(device); }

  c10::Stream getStream(c10::Device device) const override { return index(device) == HOME ? wrap(current_stream) : wrap(ELSEWHERE, index(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return index(device) == HOME ? wrap(0) : wrap(ELSEWHERE, index(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::atomic<Stream> number{0};
    return wrap(FIRST_POOL_STREAM + number++ % 32, index(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<Stream> number{FIRST_NEW_STREAM};
    return wrap(number++, index(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    if (stream.device_index() != HOME) return stream;
    return wrap(std::exchange(current_stream, stream.id()));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (stream.device_index() != HOME) device().problem("an event is recorded on another device than that of the tensors");
    if (flag == c10::EventFlag::BACKEND_DEFAULT) forbidden_in_a_capture("an event with a time is recorded");
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = device().record(stream.id(), flag == c10::EventFlag::BACKEND_DEFAULT);
  }
  void block(void* event, const c10::Stream& stream) const override {
    forbidden_in_a_capture("a stream waits for what is outside of it");
    if (event) device().wait(stream.id(), *static_cast<Event*>(event), stream.id() >= FIRST_POOL_STREAM);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override {
    forbidden_in_a_capture("the host asks for an event");
    return !event || device().happened(*static_cast<Event*>(event));
  }
  // Every operation takes a millisecond.
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto &a = *static_cast<Event*>(first), &b = *static_cast<Event*>(second);
    TORCH_CHECK(device().happened(a) && device().happened(b), "the time of an event that has not happened yet");
    return static_cast<double>(b.operations - a.operations);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    forbidden_in_a_capture("the host waits: synchronizeStream");
    device().host_waits(stream.id(), "synchronizeStream");
  }
  void synchronizeEvent(void* event) const override {
    forbidden_in_a_capture("the host waits: synchronizeEvent");
    if (event) device().host_waits_for(*static_cast<Event*>(event), "synchronizeEvent");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    forbidden_in_a_capture("the host waits: synchronizeDevice");
    device().host_waits_for_all("synchronizeDevice");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device().record_stream(static_cast<char*>(data.get()), stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Memory is given back to the allocator, and other taken. What fits in both is kept.
void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  auto other = memory.allocate(bytes);
  std::memcpy(other.get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr(std::move(other));
  storage->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage.unsafeGetStorageImpl(), bytes); }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

// --- tensors ------------------------------------------------------------------------------------------------------------------

// The same memory, as a tensor of the CPU. It keeps `t` alive.
at::Tensor as_cpu(const at::Tensor& t) {
  if (!on_device(t)) return t;
  auto options = t.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [t](void*) {}, options);
}

// --- graphs -------------------------------------------------------------------------------------------------------------------

// A tensor on the same memory that does not keep it.
at::Tensor without_keeping(const at::Tensor& t) {
  if (!on_device(t)) return t.defined() ? t.clone() : t;
  const auto& storage = t.storage();
  c10::DataPtr place(const_cast<void*>(storage.data()), t.device());
  auto weak = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(place), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(weak)), c10::DispatchKeySet(KEY), t.dtype());
  alias.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  return alias;
}

c10::IValue without_keeping(const c10::IValue& value) {
  if (value.isTensor()) return without_keeping(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> all;
    for (const at::Tensor& t : value.toTensorVector()) all.push_back(without_keeping(t));
    return c10::IValue(all);
  }
  if (value.isList() && !value.toListRef().empty() && (value.toListRef()[0].isTensor() || value.toListRef()[0].isNone())) {
    c10::List<std::optional<at::Tensor>> all;
    for (auto& each : value.toListRef())
      all.push_back(each.isNone() ? std::nullopt : std::optional<at::Tensor>(without_keeping(each.toTensor())));
    return c10::IValue(all);
  }
  return value;
}

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<at::Tensor> all;
  if (value.isList())
    for (auto& each : value.toListRef())
      if (each.isTensor()) all.push_back(each.toTensor());
  return all;
}

// An operator that is called again with the same memory, and the memory of what it returned.
struct Recorded {
  c10::OperatorHandle op;
  std::vector<c10::IValue> given, results;
};

// Operations that were captured and not run, as in a CUDA graph: what it works on it neither keeps nor makes.
struct Graph {
  emulated::Pool pool = 0;
  Stream stream = 0;
  std::string broken;
  std::vector<Recorded> recorded;
  std::map<char*, int64_t> blocks;  // in which memory lay when it was captured

  void record(const c10::OperatorHandle& op, const std::vector<c10::IValue>& given, const std::vector<c10::IValue>& results) {
    require_the_captured_stream(current_stream);
    Recorded each{op, {}, {}};
    for (auto& value : given) each.given.push_back(kept(value));
    for (auto& value : results) each.results.push_back(kept(value));
    recorded.push_back(std::move(each));
  }

  void replay() const {
    for (auto& [place, number] : blocks)
      TORCH_CHECK(device().block_number(place) == number, "a graph is replayed on memory that was given back");
    forbidden_in_a_capture("another graph is replayed");
    at::AutoDispatchBelowADInplaceOrView below;
    struct Within {
      Within() { replays = true; }
      ~Within() { replays = false; }
    } within;
    for (auto& each : recorded) {
      torch::jit::Stack stack(each.given.begin(), each.given.end());
      each.op.callBoxed(&stack);
      for (size_t i = 0; i < each.results.size(); ++i) {
        auto places = tensors_in(each.results[i]), made = tensors_in(stack[i]);
        for (size_t k = 0; k < places.size(); ++k)
          if (places[k].defined() && places[k].numel() && places[k].data_ptr() != made[k].data_ptr()) as_cpu(places[k]).copy_(as_cpu(made[k]));
      }
    }
  }

 private:
  c10::IValue kept(const c10::IValue& value) {
    for (auto& t : tensors_in(value))
      if (on_device(t) && t.numel()) {
        char* place = static_cast<char*>(t.data_ptr());
        if (const int64_t number = device().block_number(place)) blocks[place] = number;
      }
    return without_keeping(value);
  }
};

void forbidden_in_a_capture(const std::string& what) {
  if (!capture) return;
  capture->broken = what;
  TORCH_CHECK(false, "forbidden in a capture: ", what);
}
void require_the_captured_stream(Stream stream) {
  if (capture && stream != capture->stream) forbidden_in_a_capture("something is launched on another stream");
}
char* allocate_here(size_t bytes) {
  return capture ? device().allocate_in(capture->pool, bytes, current_stream) : device().allocate(bytes, current_stream, !replays);
}

void begin_capture(emulated::Pool pool) {
  forbidden_in_a_capture("another one begins");
  capture = std::make_shared<Graph>();
  capture->pool = pool;
  capture->stream = current_stream;
}
std::shared_ptr<Graph> end_capture() {
  auto graph = std::exchange(capture, nullptr);
  TORCH_CHECK(graph, "no capture has begun");
  TORCH_CHECK(graph->broken.empty(), "the capture was broken: ", graph->broken);
  return graph;
}

void require_not_pinned(std::optional<bool> pin) { TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned"); }

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  require_not_pinned(pin);
  const c10::DispatchKeySet key(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, key, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool> pin) {
  require_not_pinned(pin);
  const c10::DispatchKeySet key(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, key, c10::dtype_or_default(dtype));
}

// The result of a kernel, moved to the device.
at::Tensor to_device(const at::Tensor& t) {
  if (!t.defined() || on_device(t)) return t;
  auto moved = empty_strided(t.sizes(), t.strides(), t.scalar_type(), {}, {}, {});
  if (t.numel()) as_cpu(moved).copy_(t);
  return moved;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto shape = C10_AS_INTARRAYREF_SLOW(size);
  const size_t bytes = (c10::multiply_integers(shape) + self.storage_offset()) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) resize_storage(storage, bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_and_dtype(std::move(storage), self.dtype());
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  std::vector<Touch> touches;
  if (on_device(self)) touches.push_back({region_of(self), false});
  if (on_device(to)) touches.push_back({region_of(to), true});
  const at::Tensor& of_host = on_device(self) ? to : self;
  if (capture) {
    if (!on_device(of_host)) forbidden_in_a_capture("something is copied between host and device");
    static const auto copy = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_copy_from", "");
    capture->record(copy, {self, to, non_blocking}, {});
    return to;
  }
  device().operation("copy_", current_stream, touches);
  if (!on_device(of_host)) device().before_copy(current_stream, static_cast<char*>(of_host.data_ptr()));
  as_cpu(to).copy_(as_cpu(self));
  if (on_device(of_host)) return to;
  if (!non_blocking || !PinnedMemory::holds(of_host.storage().data()))
    device().host_waits(current_stream, on_device(to) ? "a blocking copy to the device" : "a blocking copy to the host");
  else if (of_host.is_non_overlapping_and_dense()) {
    char* place = static_cast<char*>(of_host.data_ptr());
    auto kept = std::make_shared<at::Tensor>(of_host);
    auto version = [t = kept.get()] { return t->is_inference() ? 0 : static_cast<int64_t>(t->_version()); };
    device().copy("copy_", current_stream, {place, std::string(place, of_host.nbytes())}, on_device(self), version, {kept});
  }
  return to;
}

at::Scalar value_of(const at::Tensor& self) {
  forbidden_in_a_capture("a value was read (item, bool, float)");
  device().operation("item", current_stream, {{region_of(self), false}});
  device().host_waits(current_stream, "a value was read (item, bool, float)");
  return as_cpu(self).item();
}

// --- all other kernels --------------------------------------------------------------------------------------------------------

// Kernels that take a CPU tensor without dimensions as an argument by value. (`where` copies it to the device, and the host waits.)
const std::set<std::string> TAKES_HOST_SCALARS = {
    "_foreach_mul", "_foreach_mul_", "add",     "add_",         "bitwise_and", "bitwise_or", "bitwise_xor", "div", "div_",
    "eq",           "fill_",         "ge",      "gt",           "le",          "lt",         "masked_fill", "masked_fill_",
    "maximum",      "minimum",       "mul",     "mul_",         "ne",          "pow",        "remainder",   "rsub",
    "sub",          "sub_",          "true_divide"};
// Kernels after which the host waits for their result, or for its size.
const std::set<std::string> READ_BY_THE_HOST = {"_unique",   "_unique2", "equal", "is_nonzero", "masked_select", "nonzero", "unique_consecutive",
                                                "unique_dim"};

// One call of an operator: its arguments as tensors of the CPU, and what the kernel does with memory of the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema_(op.schema()), name_(schema_.name().substr(schema_.name().find("::") + 2)), stack_(stack) {
    const size_t begin = stack.size() - arguments().size();
    given_.assign(stack.begin() + begin, stack.end());
    for (size_t i = 0; i < given_.size(); ++i) stack[begin + i] = converted(given_[i], arguments()[i]);
    if (TAKES_HOST_SCALARS.count(name_)) round_scalars(begin);
  }

  void run(const c10::OperatorHandle& op) {
    if (copies_a_scalar_ || READ_BY_THE_HOST.count(name_)) forbidden_in_a_capture(name_ + " makes the host wait");
    if (copies_a_scalar_) device().host_waits(current_stream, name_ + ": a scalar in host memory is copied to the device");
    if (!capture) device().operation(name_, current_stream, touches_);
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op.callBoxed(&stack_);
    }
    for (auto& [small, grown] : outputs_)
      if (grown.numel()) {
        resize(small, c10::fromIntArrayRefSlow(grown.sizes()), std::nullopt);
        as_cpu(small).copy_(grown);
        wrote(small);
      }
    if (READ_BY_THE_HOST.count(name_)) device().host_waits(current_stream, name_);
    const auto& returns = schema_.returns();
    const size_t begin = stack_.size() - returns.size();
    for (size_t i = 0; i < returns.size(); ++i) stack_[begin + i] = returned(stack_[begin + i], returns[i]);
    if (capture) capture->record(op, given_, {stack_.begin() + begin, stack_.end()});
  }

 private:
  const std::vector<c10::Argument>& arguments() const { return schema_.arguments(); }

  // A scalar of the device is rounded to the dtype of the arrays that it meets, before anything is computed. One of the host is not, as on CUDA
  // (aten/src/ATen/native/cuda/Loops.cuh, opmath_gpu_kernel_with_scalars).
  void round_scalars(size_t begin) {
    auto common = at::ScalarType::Undefined;
    auto meet = [&](const at::Tensor& t) {
      if (t.defined() && t.dim() && t.is_floating_point())
        common = common == at::ScalarType::Undefined ? t.scalar_type() : c10::promoteTypes(common, t.scalar_type());
    };
    for (auto& value : given_) {
      if (value.isTensor()) meet(value.toTensor());
      if (value.isTensorList())
        for (const at::Tensor& t : value.toTensorVector()) meet(t);
    }
    if (common == at::ScalarType::Undefined) return;
    auto is_scalar = [](const c10::IValue& value) {
      return value.isTensor() && on_device(value.toTensor()) && !value.toTensor().dim() && value.toTensor().is_floating_point();
    };
    for (size_t i = 0; i < given_.size(); ++i)
      if (is_scalar(given_[i])) stack_[begin + i] = stack_[begin + i].toTensor().to(common);
  }

  void wrote(const at::Tensor& t) { if (!capture) device().operation(name_ + " (result)", current_stream, {{region_of(t), true}}); }

  c10::IValue converted(const c10::IValue& value, const c10::Argument& argument) {
    const bool write = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) return converted(value.toTensor(), write, argument.name());
    if (value.isDevice()) return c10::IValue(at::Device(at::kCPU));
    if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& t : value.toTensorVector()) all.push_back(converted(t, write, argument.name()));
      return c10::IValue(all);
    }
    if (value.isList() && !value.toListRef().empty() && (value.toListRef()[0].isTensor() || value.toListRef()[0].isNone())) {
      c10::List<std::optional<at::Tensor>> all;
      for (auto& each : value.toListRef())
        all.push_back(each.isNone() ? std::nullopt : std::optional<at::Tensor>(converted(each.toTensor(), write, argument.name())));
      return c10::IValue(all);
    }
    return value;
  }

  at::Tensor converted(const at::Tensor& t, bool write, const std::string& argument) {
    if (!t.defined()) return t;
    if (on_device(t)) {
      touches_.push_back({region_of(t), write});
      if (write && t.numel() && capture) return copy_of(as_cpu(t));  // it is not run
      if (!write || t.numel()) return as_cpu(t);
      outputs_.emplace_back(t, at::empty({0}, t.options().device(at::kCPU)));  // the kernel may give it a size
      return outputs_.back().second;
    }
    if (t.dim() == 0 && name_ == "where") copies_a_scalar_ = true;
    else
      TORCH_CHECK(t.dim() == 0 && TAKES_HOST_SCALARS.count(name_), "Expected all tensors to be on the same device: ", name_,
                  " was given a CPU tensor, argument ", argument);
    return t;
  }

  static at::Tensor copy_of(const at::Tensor& t) {
    return at::empty_strided(t.sizes(), t.strides(), t.options()).copy_(t);
  }

  c10::IValue returned(const c10::IValue& value, const c10::Argument& result) {
    if (result.alias_info() && result.alias_info()->isWrite()) {  // an argument: the very tensor that was given
      for (size_t i = 0; i < given_.size(); ++i)
        if (arguments()[i].alias_info() && *arguments()[i].alias_info() == *result.alias_info()) return given_[i];
    }
    auto moved = [&](const at::Tensor& t) {
      TORCH_CHECK(!result.alias_info(), name_, " returns a view, which the emulated device does not know how to make");
      auto there = to_device(t);
      if (there.defined()) wrote(there);
      return there;
    };
    if (value.isTensor()) return moved(value.toTensor());
    if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& t : value.toTensorVector()) all.push_back(moved(t));
      return c10::IValue(all);
    }
    return value;
  }

  const c10::FunctionSchema& schema_;
  const std::string name_;
  torch::jit::Stack& stack_;
  std::vector<c10::IValue> given_;
  std::vector<Touch> touches_;
  std::vector<std::pair<at::Tensor, at::Tensor>> outputs_;  // empty ones, and what the kernel makes of them
  bool copies_a_scalar_ = false;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, *stack).run(op); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &value_of);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("is_set_to", [](const at::Tensor& self, const at::Tensor& other) { return at::native::is_set_to(self, other); });
  m.impl("record_stream", [](at::Tensor& self, at::Stream stream) {
    device().record_stream(static_cast<char*>(self.data_ptr()), stream.id());
  });
  // Views.
  m.impl("as_strided", [](const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  m.impl("view", [](const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
}

// --- for collectives ----------------------------------------------------------------------------------------------------------

void touch(const at::Tensor& t, bool write, Stream stream, const std::string& name) {
  device().operation(name, stream, {{region_of(t), write}});
}

// What has been launched last on `stream` gives `outputs` these values, and holds on to `inputs`.
void send(const std::string& name, Stream stream, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
          const std::vector<at::Tensor>& values) {
  std::vector<emulated::Result> results;
  std::vector<std::shared_ptr<void>> kept;
  for (size_t i = 0; i < outputs.size(); ++i) {
    TORCH_CHECK(outputs[i].is_contiguous() && values[i].is_contiguous() && outputs[i].nbytes() == values[i].nbytes());
    results.push_back({static_cast<char*>(outputs[i].data_ptr()),
                       std::string(static_cast<const char*>(values[i].data_ptr()), values[i].nbytes())});
    kept.push_back(std::make_shared<at::Tensor>(outputs[i]));
  }
  for (auto& input : inputs) kept.push_back(std::make_shared<at::Tensor>(input));
  device().send(name, stream, std::move(results), std::move(kept));
}

template <typename... Arguments>
std::function<void(Arguments...)> callback(const py::object& function) {
  if (function.is_none()) return {};
  auto* const held = new py::object(function);  // for the life of the process, which may end without the interpreter
  return [held](Arguments... arguments) {
    py::gil_scoped_acquire gil;
    (*held)(arguments...);
  };
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  using unlocked = py::call_guard<py::gil_scoped_release>;  // whoever holds the device's lock may wait for the interpreter's
  m.def("watch", [](const py::object& problem, const py::object& wait, const py::object& launch, std::set<std::string> names) {
    device().watch(callback<const std::string&>(problem), callback<const std::string&, int64_t>(wait), callback<const std::string&>(launch),
                   std::move(names));
  });
  m.attr("HOME") = static_cast<int>(HOME);
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("set_device", [](int device) { current_device = static_cast<c10::DeviceIndex>(device); });
  m.def("capture", [](bool on) { device().capture(on); }, unlocked());
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def("replay", &Graph::replay, unlocked())
      .def_property_readonly("operations", [](const Graph& graph) { return graph.recorded.size(); });
  m.def("forbidden_in_a_capture", &forbidden_in_a_capture);
  m.def("begin_capture", &begin_capture);
  m.def("end_capture", &end_capture);
  m.def("drop", [](emulated::Pool pool) { device().drop(pool); }, unlocked());
  m.def("bytes_of", [](emulated::Pool pool) { return device().bytes_of(pool); }, unlocked());
  m.def("current_stream", [] { return current_stream; });
  m.def("use_stream", [](Stream stream) { return std::exchange(current_stream, stream); });
  m.def("wait_for", [](Stream stream, Stream other) { device().wait(stream, device().record(other)); }, unlocked());
  m.def("host_alias", &as_cpu);
  m.def("touch", &touch, unlocked());
  m.def("send", &send, unlocked());
  m.def("messages_on_their_way", [] { return device().messages_on_their_way(); }, unlocked());
  m.def("operations", [] { return device().operations(); }, unlocked());
  m.def("memory", [] { return device().memory(); }, unlocked());
}
