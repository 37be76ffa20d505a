// The process group of the test device, as NCCL is that of CUDA: it takes no tensor of the host. It copies each tensor
// to the host, lets gloo work there, and copies what comes of it back before the operation counts as done.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <functional>

namespace {

using c10::ivalue::Future;
using c10d::Backend;
using Tensors = std::vector<at::Tensor>;

void require_on_device(const Tensors& tensors) {
  for (const auto& each : tensors) {
    TORCH_CHECK(each.device().type() == c10::DeviceType::PrivateUse1,
                "No backend type associated with device type ", each.device().type());
  }
}

Tensors on_host(const Tensors& tensors) {
  require_on_device(tensors);
  Tensors copies;
  for (const auto& each : tensors) {
    copies.push_back(each.detach().cpu());
  }
  return copies;
}

void copy(const Tensors& from, const Tensors& to) {
  c10::InferenceMode guard(false);
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < to.size(); i++) {
    to[i].detach().copy_(from[i]);
  }
}

// What gloo does for the device: it is done when its result is back there, or when gloo has failed.
class Copied : public c10d::Work {
 public:
  Copied(int rank, c10d::OpType type, const c10::intrusive_ptr<Work>& inner, const Tensors& outputs,
         std::function<void()> bring_back)
      : Work(rank, type), inner_(inner) {
    std::vector<c10::Device> devices;
    for (const auto& each : outputs) {
      devices.push_back(each.device());
    }
    future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()), devices);
    auto future = future_;
    inner->getFuture()->addCallback([future, outputs, bring_back](Future& done) {
      if (done.hasError()) {
        future->setError(done.exception_ptr());
        return;
      }
      try {
        bring_back();
        future->markCompleted(c10::IValue(outputs));
      } catch (...) {
        future->setErrorIfNeeded(std::current_exception());
      }
    });
  }

  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return future_->completed() && !future_->hasError(); }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { inner_->abort(); }

  bool wait(std::chrono::milliseconds) override {
    future_->waitAndThrow();
    return true;
  }

 private:
  c10::intrusive_ptr<Work> inner_;
  c10::intrusive_ptr<Future> future_;
};

class Walled : public Backend {
 public:
  explicit Walled(const c10::intrusive_ptr<Backend>& gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(gloo) {}

  const std::string getBackendName() const override { return "walled"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = std::make_shared<Tensors>(on_host(tensors));
    auto summed = options;
    const bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;  // of whole numbers, too: gloo's is of others alone
    if (is_mean) {
      summed.reduceOp = c10d::ReduceOp::SUM;
    }
    const auto size = getSize();
    return c10::make_intrusive<Copied>(
        getRank(), c10d::OpType::ALLREDUCE, gloo_->allreduce(*host, summed), tensors, [host, tensors, is_mean, size] {
          for (auto& each : *host) {
            if (is_mean) {
              each.div_(size, at::isIntegralType(each.scalar_type(), false)
                                  ? std::optional<c10::string_view>("trunc")
                                  : std::nullopt);
            }
          }
          copy(*host, tensors);
        });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = std::make_shared<Tensors>(on_host(tensors));
    return done(c10d::OpType::BROADCAST, gloo_->broadcast(*host, options), tensors, host);
  }

  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) override {
    auto given = std::make_shared<Tensors>(on_host(inputs));
    auto host = std::make_shared<std::vector<Tensors>>();
    Tensors all;
    for (const auto& each : outputs) {
      host->push_back(on_host(each));
      all.insert(all.end(), each.begin(), each.end());
    }
    auto work = gloo_->allgather(*host, *given, options);
    return c10::make_intrusive<Copied>(getRank(), c10d::OpType::ALLGATHER, work, all, [host, given, outputs] {
      for (size_t i = 0; i < outputs.size(); i++) {
        copy((*host)[i], outputs[i]);
      }
    });
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    auto host = std::make_shared<Tensors>(on_host({output, input}));
    return done(c10d::OpType::_ALLGATHER_BASE, gloo_->_allgather_base((*host)[0], (*host)[1], options), {output},
                host);
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return done(c10d::OpType::BARRIER, gloo_->barrier(c10d::BarrierOptions()), {}, std::make_shared<Tensors>());
  }

 private:
  c10::intrusive_ptr<c10d::Work> done(c10d::OpType type, const c10::intrusive_ptr<c10d::Work>& work,
                                      const Tensors& outputs, const std::shared_ptr<Tensors>& host) {
    return c10::make_intrusive<Copied>(getRank(), type, work, outputs, [host, outputs] { copy(*host, outputs); });
  }

  c10::intrusive_ptr<Backend> gloo_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("over", [](const c10::intrusive_ptr<Backend>& gloo) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<Walled>(gloo);
  });
}
