// A device of torch that computes on the CPU and keeps its memory from everybody else: whoever reads an address of it on
// the host dies of SIGSEGV. There are two of it, or as many as WALLED_VISIBLE_DEVICES says, each with a generator, and
// with as much memory as WALLED_MEMORY says. What it copies without blocking into registered memory of the host arrives
// when its stream or an event behind it is waited for; on a side stream it is not even read before.
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

#include <atomic>
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
const size_t kMemory = std::getenv("WALLED_MEMORY") ? std::atoll(std::getenv("WALLED_MEMORY")) : SIZE_MAX;
std::mutex lock;
std::map<void*, Block> blocks;
size_t used = 0, peak = 0;  // of all devices together

void release(void* address) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks.find(address);
  if (found == blocks.end()) return;
  munmap(address, found->second.size);
  used -= found->second.size;
  blocks.erase(found);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device device{kWalled, current};
    if (size == 0) return {nullptr, nullptr, &release, device};
    std::lock_guard<std::mutex> guard(lock);
    TORCH_CHECK_WITH(OutOfMemoryError, used + size <= kMemory, "the test device is out of memory");
    void* address = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, address != MAP_FAILED, "the host is out of memory");
    blocks[address] = {size, 0};
    used += size;
    peak = std::max(peak, used);
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

std::map<char*, size_t> registered;  // memory of the host that the device may write to later

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;
struct Copy { at::Tensor target, source; };
struct Lag { std::list<Copy> copies; uint64_t done = 0; };  // what a stream still has to do, and has done
std::mutex running;
std::map<StreamKey, Lag> lags;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_stream;

StreamKey key_on(c10::DeviceIndex device) { return {device, current_stream[device]}; }

// Does what a stream was given, up to a number of copies since its begin.
void catch_up(StreamKey key, uint64_t until = UINT64_MAX) {
  std::list<Copy> done;  // freed without the lock: that may wait for the interpreter's
  std::lock_guard<std::mutex> guard(running);
  auto& lag = lags[key];
  while (lag.done < until && !lag.copies.empty()) {
    auto& [target, source] = lag.copies.front();
    Open from(source.storage());
    auto content = on_host(source).to(target.scalar_type(), false, false, at::MemoryFormat::Contiguous);
    memcpy(target.data_ptr(), content.data_ptr(), content.nbytes());
    done.splice(done.end(), lag.copies, lag.copies.begin());
    lag.done++;
  }
}

// Of the default stream nothing is to be read late, so what it computes, each time through copies, need not wait.
void keep_order(c10::DeviceIndex device) {
  if (auto key = key_on(device); key.second) catch_up(key);
}

bool is_registered(const at::Tensor& tensor) {
  std::lock_guard<std::mutex> guard(lock);
  auto after = registered.upper_bound(static_cast<char*>(tensor.data_ptr()));
  return after != registered.begin() && tensor.data_ptr() < std::prev(after)->first + std::prev(after)->second;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (non_blocking && target.device().is_cpu() && target.is_contiguous() && is_registered(target)) {
    auto key = key_on(self.get_device());
    Open from(self.storage());
    // What the default stream does to the source next comes after the copy; for a side stream, who knows?
    auto source = key.second ? self : on_host(self).clone();
    std::lock_guard<std::mutex> guard(running);
    lags[key].copies.push_back({target, source});
    return target;
  }
  keep_order((self.device().is_cpu() ? target : self).get_device());
  Open from(self.storage()), to(target.storage());
  on_host(target).copy_(on_host(self));
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
  keep_order(index);
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
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, resolve(device), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_stream[resolve(device).index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream(device, ++last);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(next.device(), std::exchange(current_stream[next.device_index()], next.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  struct Event { StreamKey key; uint64_t until; };
  static StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  static bool is_done(StreamKey key, uint64_t until) {
    std::lock_guard<std::mutex> guard(running);
    return lags[key].copies.empty() || lags[key].done >= until;
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard<std::mutex> guard(running);
    auto& lag = lags[key_of(stream)];
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {key_of(stream), lag.done + lag.copies.size()};
  }
  void synchronizeEvent(void* event) const override {
    auto* found = static_cast<Event*>(event);
    if (found) catch_up(found->key, found->until);
  }
  // What the other stream is given from now on is done at once, so what it waits for is, too.
  void block(void* event, const c10::Stream&) const override { synchronizeEvent(event); }
  bool queryEvent(void* event) const override {
    auto* found = static_cast<Event*>(event);
    return !found || is_done(found->key, found->until);
  }
  bool queryStream(const c10::Stream& stream) const override { return is_done(key_of(stream), UINT64_MAX); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeStream(const c10::Stream& stream) const override { catch_up(key_of(stream)); }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    std::vector<StreamKey> keys;
    {
      std::lock_guard<std::mutex> guard(running);
      for (auto& [key, lag] : lags) keys.push_back(key);
    }
    for (auto key : keys) {
      if (key.first == resolve({kWalled, index}).index()) catch_up(key);
    }
  }
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
  m.def("peak_bytes", []() -> int64_t { return peak; });
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
