// Device "cuda" for fake tensors in a build of PyTorch without CUDA.
//
// Loaded before torch is initialised (pretend.py does it), this library registers what PyTorch asks of a device that
// holds no data: a guard with one device and one stream, and hooks that answer "one GPU". Code under a FakeTensorMode
// then takes its GPU branches. Nothing is computed: operators run their meta kernels, which check shapes, dtypes and
// devices.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace pretend {

constexpr auto kDevice = c10::DeviceType::CUDA;

c10::Device only_device() { return {kDevice, 0}; }
c10::Stream only_stream() { return c10::Stream(c10::Stream::DEFAULT, only_device()); }

// Of the no-op guard for accelerators, what would otherwise raise or name no device.
class Guard final : public c10::impl::NoOpDeviceGuardImpl<kDevice> {
 public:
  c10::Device getDevice() const override { return only_device(); }
  c10::Device exchangeDevice(c10::Device) const override { return only_device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return only_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

class Hooks final : public at::CUDAHooksInterface {
 public:
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
};

[[maybe_unused]] const bool registered = [] {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kDevice)].store(new Guard());
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks", [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> {
        return std::make_unique<Hooks>(args);
      });
  return true;
}();

}  // namespace pretend
