//! The command line of the virtual machine, and its accelerator.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::control::PORT;
use super::image::Image;
use super::tool::Tool;

pub(super) const PROGRAM: &str = "qemu-system-x86_64";

/// The accelerator that executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor (`/dev/kvm`).
    Kvm,
    /// QEMU's emulator: some 10 to 30 times slower, and the same behaviour.
    Tcg,
}

/// A tap that becomes one of the guest's network interfaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Nic {
    /// Name of the tap in the namespace in which QEMU is started.
    pub(super) tap: String,
    /// The guest's hardware address on it.
    pub(super) mac: String,
}

/// A virtual machine to be started.
#[derive(Debug, Clone)]
pub(super) struct QemuMachine<'a> {
    pub(super) image: &'a Image,
    pub(super) cpus: u8,
    pub(super) memory_mib: u32,
    /// Mounted read-only at `/host`.
    pub(super) programs: PathBuf,
    /// Mounted at `/share`.
    pub(super) share: Option<PathBuf>,
    pub(super) nics: Vec<Nic>,
}

impl QemuMachine<'_> {
    /// The command that runs it. Its standard input and output are the control channel, its
    /// standard error is the console.
    pub(super) fn command(&self, accelerator: Accelerator) -> Command {
        let mut command = Command::new(PROGRAM);
        match accelerator {
            Accelerator::Kvm => command.args(["-accel", "kvm", "-cpu", "host"]),
            Accelerator::Tcg => command.args(["-accel", "tcg,thread=multi", "-cpu", "max"]),
        };
        command.args([
            "-machine",
            "microvm,rtc=on",
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
        ]);
        command.args(["-m", &self.memory_mib.to_string(), "-smp", &self.cpus.to_string()]);
        command.arg("-kernel").arg(self.image.kernel());
        command.arg("-initrd").arg(self.image.initrd());
        command.args(["-append", &kernel_command_line(accelerator)]);
        command.args([
            "-chardev",
            "file,id=console,path=/dev/stderr",
            "-serial",
            "chardev:console",
        ]);
        command.args(["-global", "virtio-mmio.force-legacy=false", "-device", "virtio-rng-device"]);
        command.args([
            "-chardev",
            "stdio,id=control,signal=off",
            "-device",
            "virtio-serial-device",
        ]);
        command.args(["-device", &format!("virtserialport,chardev=control,name={PORT}")]);
        directory(&mut command, "host", &self.programs, ",readonly=on");
        if let Some(share) = &self.share {
            directory(&mut command, "share", share, "");
        }
        for (number, nic) in self.nics.iter().enumerate() {
            let tap = format!("tap,id=n{number},ifname={},script=no,downscript=no", nic.tap);
            // Frames as on a wire: complete checksums, no super-packets.
            let device = format!(
                "virtio-net-device,netdev=n{number},mac={},csum=off,gso=off,guest_csum=off,guest_tso4=off,\
                 guest_tso6=off,guest_ecn=off,guest_ufo=off,mrg_rxbuf=on",
                nic.mac
            );
            command.args(["-netdev", &tap, "-device", &device]);
        }
        command
    }
}

/// Shares a directory by 9p under the tag `name`.
fn directory(command: &mut Command, name: &str, path: &Path, options: &str) {
    // A comma in an option must be doubled.
    let path = path.display().to_string().replace(',', ",,");
    let fsdev = format!("local,id={name},path={path},security_model=none,multidevs=remap{options}");
    let device = format!("virtio-9p-device,fsdev={name},mount_tag={name}");
    command.args(["-fsdev", &fsdev, "-device", &device]);
}

fn kernel_command_line(accelerator: Accelerator) -> String {
    let mut line = String::from("console=ttyS0 quiet panic=-1 mitigations=off nokaslr");
    if accelerator == Accelerator::Tcg {
        line += " tsc=reliable no_timer_check";
        // The emulated counter runs at the host's rate. On a busy host the guest cannot measure
        // that rate, and hangs.
        if let Some(khz) = tsc_khz() {
            line += &format!(" tsc_early_khz={khz}");
        }
    }
    line
}

/// The rate of the time stamp counter, as the kernel detected it; else the processor's rate.
fn tsc_khz() -> Option<u64> {
    let log = Tool::new("dmesg").read().unwrap_or_default();
    let detected = log.lines().rev().find_map(|line| {
        let mhz = line.split_once("tsc: Detected ")?.1.split(' ').next()?;
        mhz.parse::<f64>().ok()
    });
    let mhz = detected.or_else(|| {
        let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
        let line = info.lines().find(|line| line.starts_with("cpu MHz"))?;
        line.split_once(':')?.1.trim().parse().ok()
    })?;
    Some((mhz * 1000.0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_paths_are_doubled() {
        let mut command = Command::new("x");
        directory(&mut command, "host", Path::new("/a,b"), ",readonly=on");
        let text = format!("{command:?}");
        assert!(text.contains("path=/a,,b,") && text.contains("readonly=on"), "{text}");
    }
}
