//! The choice of the device: options of every command that opens one.

use std::ffi::OsStr;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, Command};
use rocinante::device::{Backend, DEVICE_VARIABLE, FAULT_VARIABLE, Interface};
use rocinante::{Context, OpenOptions, VerbsError};

use super::address;
use super::own::Own;
use crate::ending;
use crate::output::{Failure, Kind, Output, Result};

/// Of `--fault-log` without a fault.
pub const NOTHING_TO_LOG: &str = "--fault-log: there are no faults, so nothing is written";

/// The choice of device and backend.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct OpenArgs {
    /// Carry the packets by afxdp, packet, udp, or auto: the best of them that bypasses no rule
    /// [default: the variable ROCINANTE_NETDEV, else auto]
    #[arg(long, value_name = "NETDEV", value_parser = NetdevParser)]
    pub netdev: Option<Netdev>,
    /// Use this device: an RDMA device of the kernel (mlx5_0, rxe0; "hw" for the one with the
    /// address), or a network interface, for the device in software on it [default: the variable
    /// ROCINANTE_DEVICE, else the device in software]
    #[arg(id = "device", long, value_name = "NAME")]
    pub name: Option<String>,
    /// Make the device in software of N shards, each with its own thread and lock: queue pairs are
    /// spread over them, and those of the connection manager are on the first [default: the
    /// variable ROCINANTE_SHARDS, else 1]
    #[arg(long, value_name = "N")]
    pub shards: Option<usize>,
    /// Let the device and its datagrams meet faults, such as loss=2%,delay=100us,seed=7, or those
    /// of a schedule in a .toml file [default: the variable ROCINANTE_FAULT, else none]
    #[arg(long, value_name = "FAULTS", value_parser = fault)]
    pub fault: Option<String>,
    /// Append a line of JSON to this file for each datagram or call that met a fault [default: the
    /// variable ROCINANTE_FAULT_LOG, else none]
    #[arg(long, value_name = "FILE")]
    pub fault_log: Option<PathBuf>,
}

/// The choice of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Netdev {
    /// The best available one.
    Auto,
    /// This one.
    Only(Backend),
}

/// Parses `--netdev`, and has its values for completions.
#[derive(Clone)]
struct NetdevParser;

impl TypedValueParser for NetdevParser {
    type Value = Netdev;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<Netdev, clap::Error> {
        netdev.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let values = ["auto", "udp", "packet", "afxdp"];
        Some(Box::new(values.into_iter().map(PossibleValue::new)))
    }
}

/// Checks `--fault`. Error: a line that says what to change.
pub fn fault(words: &str) -> Result<String, String> {
    OpenOptions::check_fault(words).map(|_| words.to_owned())
}

/// The faults that datagrams meet, by the option or else the variable; `None` if they meet none.
pub fn faults_of(option: Option<&str>) -> Option<String> {
    let words = option.map(str::to_owned).or_else(|| std::env::var(FAULT_VARIABLE).ok());
    words.filter(|words| OpenOptions::check_fault(words) == Ok(true))
}

fn netdev(name: &str) -> Result<Netdev, String> {
    match name {
        "auto" => Ok(Netdev::Auto),
        "sim" => Err("the simulator connects nothing: choose auto, afxdp, packet or udp".into()),
        name => name.parse().map(Netdev::Only).map_err(|why: String| format!("{why}, or auto")),
    }
}

impl OpenArgs {
    /// The same options as words of a command line.
    pub fn to_words(&self) -> Vec<String> {
        let netdev = self.netdev.map(|netdev| match netdev {
            Netdev::Auto => "auto".to_owned(),
            Netdev::Only(backend) => backend.to_string(),
        });
        let shards = self.shards.map(|count| count.to_string());
        let log = self.fault_log.as_ref().map(|log| log.to_string_lossy().into_owned());
        let words = [
            ("--netdev", netdev),
            ("--device", self.name.clone()),
            ("--shards", shards),
            ("--fault", self.fault.clone()),
            ("--fault-log", log),
        ];
        let given = words.into_iter().filter_map(|(option, word)| Some([option.into(), word?]));
        given.flatten().collect()
    }

    /// Opens the device from which `server` is reached, or the one with the address `own`. Error:
    /// there is no route, or the device cannot be opened.
    pub fn open_towards(
        &self,
        server: SocketAddr,
        own: Option<&Own>,
        out: Output,
    ) -> Result<Context> {
        self.open(address::local(server, own)?, out)
    }

    /// The device that the user named.
    pub(super) fn named(&self) -> Option<String> {
        let variable = || std::env::var(DEVICE_VARIABLE).ok();
        self.name.clone().or_else(variable).filter(|name| !name.is_empty())
    }

    /// The address of the device that `--device` names. For an interface without `route` it is the
    /// first of the same family, or the first; for a device of the kernel, and without the option,
    /// it is `route`. Error: the interface has no address.
    pub(super) fn address(&self, route: IpAddr) -> Result<IpAddr> {
        let name = self.name.as_deref().filter(|name| *name != "hw");
        match name.and_then(|name| Interface::by_name(name).ok()) {
            Some(interface) => nearest(&interface, route),
            None => Ok(route),
        }
    }

    /// Opens the device in software of an interface, with all its addresses.
    pub fn open_interface(&self, name: &str, out: Output) -> Result<Context> {
        self.open_by(|options| options.open_interface(name), name, out)
    }

    /// Opens the device with `address`. Prints its name and the reason for its backend. Error:
    /// there is no such device, or the backend is not available. The text says what to do.
    pub fn open(&self, address: IpAddr, out: Output) -> Result<Context> {
        self.open_by(|options| options.open(address), &address.to_string(), out)
    }

    fn open_by(
        &self,
        open: impl FnOnce(OpenOptions) -> Result<Context, VerbsError>,
        place: &str,
        out: Output,
    ) -> Result<Context> {
        ending::enter("opening the device");
        let mut options = OpenOptions::new();
        options = match self.netdev {
            Some(Netdev::Only(backend)) => options.netdev(backend),
            Some(Netdev::Auto) => options.netdev_auto(),
            None => options,
        };
        if let Some(name) = &self.name {
            options = options.device(name);
        }
        if let Some(count) = self.shards {
            options = options.shards(count);
        }
        if let Some(words) = &self.fault {
            options = options.fault(words);
        }
        if let Some(log) = &self.fault_log {
            options = options.fault_log(log);
        }
        let ctx = open(options).map_err(no_device)?;
        ending::opened(&ctx);
        if self.shards.is_some_and(|count| count != ctx.shards()) {
            let why = format!("{} is a device of the kernel: leave out --shards", ctx.name());
            return Err(Failure::Usage(why));
        }
        self.name_missing_faults(&ctx, out)?;
        let (name, why) = (ctx.name(), &ctx.query_device().chosen_because);
        match ctx.shards() {
            1 => out.note(format_args!("device {name} at {place}, {why}")),
            count => out.note(format_args!("device {name} at {place}, {count} shards, {why}")),
        }
        Ok(ctx)
    }

    /// Says which faults there are not, although the user asks for them. Error: as an option.
    fn name_missing_faults(&self, ctx: &Context, out: Output) -> Result {
        let is_kernels = ctx.backend().is_none();
        match (faults_of(self.fault.as_deref()), &self.fault_log) {
            (Some(_), _) if is_kernels && self.fault.is_some() => {
                let why = format!("{} is a device of the kernel: leave out --fault", ctx.name());
                return Err(Failure::Usage(why));
            }
            (Some(words), _) if is_kernels => out.note(format_args!(
                "{FAULT_VARIABLE}={words}: no faults, because {} is a device of the kernel",
                ctx.name()
            )),
            (None, Some(_)) => out.note(NOTHING_TO_LOG),
            _ => {}
        }
        Ok(())
    }
}

/// The address of `interface` that is nearest to `route`.
fn nearest(interface: &Interface, route: IpAddr) -> Result<IpAddr> {
    let addresses = || interface.addresses.iter().map(|(address, _)| *address);
    let found = addresses()
        .find(|address| *address == route)
        .or_else(|| addresses().find(|address| address.is_ipv4() == route.is_ipv4()))
        .or_else(|| addresses().next());
    found.ok_or_else(|| {
        let name = &interface.name;
        let why = format!("{name} has no address: give it one with `ip address add`");
        Failure::Of(Kind::Device, why)
    })
}

/// The failure of a device that is not there, or cannot be opened.
#[must_use]
pub fn no_device(error: impl Into<Failure>) -> Failure {
    match error.into() {
        Failure::Failed(why) => Failure::Of(Kind::Device, why),
        failure => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_address_is_the_routes_or_of_its_family() {
        let addresses = |all: &[&str]| {
            all.iter().map(|text| (text.parse::<IpAddr>().unwrap(), 64)).collect::<Vec<_>>()
        };
        let mut eth = Interface {
            name: "eth7".to_owned(),
            index: 7,
            mtu: 1500,
            mac: [2; 6],
            up: true,
            loopback: false,
            addresses: addresses(&["10.0.0.5", "fd00::5", "fe80::5"]),
        };
        for (route, address) in [
            ("fe80::5", "fe80::5"),
            ("fd00::5", "fd00::5"),
            ("fd00::9", "fd00::5"),
            ("192.0.2.1", "10.0.0.5"),
        ] {
            assert_eq!(nearest(&eth, route.parse().unwrap()), Ok(address.parse().unwrap()));
        }
        let v6 = "fd00::9".parse().unwrap();
        eth.addresses.truncate(1);
        assert_eq!(nearest(&eth, v6), Ok("10.0.0.5".parse().unwrap()));
        eth.addresses.clear();
        assert!(nearest(&eth, v6).unwrap_err().to_string().contains("eth7 has no address"));
    }

    #[test]
    fn a_device_of_the_kernels_has_the_routes_address() {
        let route = "192.0.2.1".parse().unwrap();
        let of = |name: Option<&str>| {
            let name = name.map(str::to_owned);
            OpenArgs { name, ..OpenArgs::default() }.address(route)
        };
        for name in [None, Some("hw"), Some("mlx5_77")] {
            assert_eq!(of(name), Ok(route), "{name:?}");
        }
        assert_eq!(of(Some("lo")), Ok("127.0.0.1".parse().unwrap()));
    }
}
