// A device of torch that computes on the CPU and keeps its memory from everybody else: whoever reads an address of it on
// the host dies of SIGSEGV. There are two of it, or as many as WALLED_VISIBLE_DEVICES says, each with a generator. What it
// copies without blocking into registered memory of the host arrives when it is waited for.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <cstdlib>
#include <list>
#include <map>
#include <mutex>

namespace {
constexpr auto kWalled = c10::DeviceType::PrivateUse1;
const int kDevices = std::getenv("WALLED_VISIBLE_DEVICES") ? std::atoi(std::getenv("WALLED_VISIBLE_DEVICES")) : 2;
thread_local c10::DeviceIndex current = 0;

c10::Device resolve(c10::Device device) { return {kWalled, device.has_index() ? device.index() : current}; }

// ---- Memory

struct Block { size_t size; int users; };
std::mutex lock;
std::map<void*, Block> blocks;

void release(void* address) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks.find(address);
  if (found == blocks.end()) return;
  munmap(address, found->second.size);
  blocks.erase(found);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device device{kWalled, current};
    if (size == 0) return {nullptr, nullptr, &release, device};
    void* address = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "the test device is out of memory");
    std::lock_guard<std::mutex> guard(lock);
    blocks[address] = {size, 0};
    return {address, address, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "not of the host"); }
} allocator;
REGISTER_ALLOCATOR(kWalled, &allocator);

// Opens the memory of a storage while it lives.
struct Open {
  void* address;
  explicit Open(const c10::Storage& storage) : address(storage.mutable_data()) { count(1); }
  ~Open() { count(-1); }
  void count(int change) const {
    std::lock_guard<std::mutex> guard(lock);
    auto found = blocks.find(address);
    if (found == blocks.end()) return;  // the host's
    found->second.users += change;
    mprotect(address, found->second.size, found->second.users ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
};

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

// ---- Copies

std::map<char*, size_t> registered;           // memory of the host that the device may write to later
std::vector<std::pair<at::Tensor, at::Tensor>> late;  // what it still has to write there

void finish() {
  std::vector<std::pair<at::Tensor, at::Tensor>> done;  // freed without the lock: that may wait for the interpreter's
  std::lock_guard<std::mutex> guard(lock);
  for (auto& [target, source] : late) memcpy(target.data_ptr(), source.data_ptr(), source.nbytes());
  done.swap(late);
}

bool is_registered(const at::Tensor& tensor) {
  std::lock_guard<std::mutex> guard(lock);
  auto after = registered.upper_bound(static_cast<char*>(tensor.data_ptr()));
  return after != registered.begin() && tensor.data_ptr() < std::prev(after)->first + std::prev(after)->second;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  Open from(self.storage()), to(target.storage());
  auto source = on_host(self);
  if (non_blocking && target.device().is_cpu() && target.is_contiguous() && is_registered(target)) {
    auto copied = source.to(target.scalar_type(), false, true, at::MemoryFormat::Contiguous);
    std::lock_guard<std::mutex> guard(lock);
    late.emplace_back(target, copied);
  } else {
    on_host(target).copy_(source);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  return copy_from(self, target.resize_(self.sizes()), false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  Open open(tensor.storage());
  return on_host(tensor).item();
}

// ---- Factories and views

struct On {  // a device, while it lives
  c10::DeviceIndex before = current;
  explicit On(std::optional<at::Device> device) { current = resolve(device.value_or(at::Device(kWalled))).index(); }
  ~On() { current = before; }
};
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On on(device);
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  On on(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  int64_t size = source.nbytes() / self.dtype().itemsize();
  return at::native::set_storage_cpu_(self, source, 0, {size}, {});
}

// ---- Random numbers

// The CPU's algorithm, with another device, and a state of another length. Kernels of the CPU draw from it while it says
// that it is the CPU's.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::Device device) { device_ = device; }
  void pretend(c10::Device device) { device_ = device; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state(CPUGeneratorImpl::get_state());
    return at::cat({state, at::zeros({1}, at::kByte)}).getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    auto plain = at::from_blob(const_cast<void*>(state.data()), {state.numel() - 1}, at::kByte);
    CPUGeneratorImpl::set_state(*plain.unsafeGetTensorImpl());
  }
};

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<Generator>(resolve({kWalled, index}));
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> all{new_generator(0), new_generator(1)};
  return all.at(resolve({kWalled, index}).index());
}

struct Pretending {
  Generator* generator;
  c10::Device device;
  explicit Pretending(const at::Generator& each)
      : generator(dynamic_cast<Generator*>(each.unsafeGetGeneratorImpl())), device(each.device()) {
    if (generator) generator->pretend(at::kCPU);
  }
  ~Pretending() { if (generator) generator->pretend(device); }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  auto* values = &(*stack)[stack->size() - arguments.size()];
  auto index = current;
  std::list<Pretending> pretending;
  for (size_t i = arguments.size(); i-- > 0;) {
    if (values[i].isTensor() && values[i].toTensor().is_privateuseone()) index = values[i].toTensor().get_device();
  }
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].type()->str().find("Generator") == std::string::npos) continue;
    if (values[i].isNone()) values[i] = default_generator(index);
    pretending.emplace_back(values[i].toGenerator());
  }
  at::native::cpu_fallback(op, stack);
}

// The CPU's would draw from the CPU's own generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input).bernoulli_(1 - p);
  return {input * mask / (1 - p), mask.to(at::kBool)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("native_dropout", native_dropout);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}

// ---- What torch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kWalled; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kWalled, current}; }
  void setDevice(c10::Device device) const override { current = resolve(device).index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = resolve(device).index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, resolve(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override { *event = &lock; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return late.empty(); }
  bool queryStream(const c10::Stream&) const override { return late.empty(); }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override { finish(); }
  void synchronizeStream(const c10::Stream&) const override { finish(); }
  void synchronizeDevice(c10::DeviceIndex) const override { finish(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  Hooks() { at::RegisterPrivateUse1HooksInterface(this); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
  at::Device getDeviceFromPtr(void*) const override { return {kWalled, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    On on(storage.device());
    c10::Storage grown(c10::Storage::use_byte_size_t(), size, &allocator, true);
    Open from(storage), to(grown);
    if (storage.nbytes()) memcpy(grown.mutable_data(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(grown.mutable_data_ptr()));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
} hooks;

TORCH_LIBRARY(walled, m) {
  m.def("device_count", []() -> int64_t { return kDevices; });
  m.def("default_generator", [](int64_t index) { return default_generator(index); });
  m.def("register", [](int64_t address, int64_t size) {
    std::lock_guard<std::mutex> guard(lock);
    registered[reinterpret_cast<char*>(address)] = size;
  });
  m.def("unregister", [](int64_t address) {
    std::lock_guard<std::mutex> guard(lock);
    registered.erase(reinterpret_cast<char*>(address));
  });
}
}  // namespace
