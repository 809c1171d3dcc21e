//! Finds the device by the options that users of these programs know: `-d eth0 -i 1 -g 0`.

use std::net::IpAddr;

use rocinante::Context;
use rocinante::device::Interface;

use crate::output::{Failure, Kind, Output};
use crate::session::{NetArgs, OpenArgs, Own};

/// Device options of the programs in [`compat`](crate::compat).
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DeviceArgs {
    /// The device, which is a network interface, or an RDMA device of the kernel (`rocinante
    /// devices` lists them), as --device
    #[arg(short = 'd', long, value_name = "INTERFACE")]
    pub ib_dev: Option<String>,
    /// The device's port, always 1
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u32).range(1..=1))]
    pub ib_port: Option<u32>,
}

/// The wanted address of the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AddressChoice {
    /// The local address of the TCP connection, or the device's first of its family.
    #[default]
    Any,
    /// The first global IPv6 address.
    Ipv6,
    /// The address with this index in the GID table. The user gave the index with `option`.
    Gid {
        /// As `rocinante devices` shows it.
        index: usize,
        /// `-g` or `-x`.
        option: &'static str,
    },
}

/// Opens the chosen device. `route` is the local address of the TCP connection.
///
/// # Errors
/// There is no such device or address; the options contradict each other.
pub fn open(
    net: &NetArgs,
    args: &DeviceArgs,
    choice: AddressChoice,
    route: IpAddr,
    out: Output,
) -> Result<Context, Failure> {
    if let Some(name) = kernel_device(net, args) {
        if choice != AddressChoice::Any {
            return Err(Failure::Usage(format!(
                "{name} is a device of the kernel: --bind says which of its addresses to use"
            )));
        }
        let device = OpenArgs { name: Some(name), ..net.device.clone() };
        return device.open(net.bind.as_ref().map_or(route, |own| own_address(own, route)), out);
    }
    let named = net.device.name.as_ref().or(args.ib_dev.as_ref());
    let address = match &net.bind {
        Some(own) => {
            if args.ib_dev.is_some() || choice != AddressChoice::Any {
                return Err(Failure::Usage(
                    "--bind says which address to use: leave out -d, the GID's index and --ipv6"
                        .into(),
                ));
            }
            own_address(own, route)
        }
        None if named.is_none() && choice == AddressChoice::Any => route,
        None => chosen(&interface(named, route)?, choice, route)?,
    };
    net.device.open(address, out)
}

/// The address of `own` for packets that go where `route` does.
fn own_address(own: &Own, route: IpAddr) -> IpAddr {
    own.towards(route).unwrap_or_else(|| own.first())
}

/// The chosen device, if it is not a network interface.
fn kernel_device(net: &NetArgs, args: &DeviceArgs) -> Option<String> {
    let name = net.device.name.as_ref().or(args.ib_dev.as_ref())?;
    if net.device.name.is_some() && name == "hw" {
        return Some(name.clone());
    }
    let known = Interface::by_name(name).is_ok();
    let listed = std::path::Path::new("/sys/class/infiniband").join(name).exists();
    // A name of neither kind fails later, with an error from the code that opens it.
    (!known && (listed || net.device.name.is_some())).then(|| name.clone())
}

fn interface(name: Option<&String>, route: IpAddr) -> Result<Interface, Failure> {
    let found = match name {
        Some(name) => Interface::by_name(name).map_err(|error| {
            format!(
                "there is no device {name:?}: {error}: a device is a network interface here, and `rocinante devices` lists them"
            )
        }),
        None => Interface::by_address(route)
            .map_err(|error| format!("no interface has {route}: {error}: give one with -d")),
    };
    found.map_err(|why| Failure::Of(Kind::Device, why))
}

fn chosen(interface: &Interface, choice: AddressChoice, route: IpAddr) -> Result<IpAddr, Failure> {
    let addresses = || interface.addresses.iter().map(|(address, _)| *address);
    let name = &interface.name;
    let found = match choice {
        AddressChoice::Any => addresses()
            .find(|address| *address == route)
            .or_else(|| addresses().find(|address| address.is_ipv4() == route.is_ipv4()))
            .or_else(|| addresses().next())
            .ok_or_else(|| format!("{name} has no address: give it one with `ip address add`")),
        AddressChoice::Ipv6 => addresses()
            .find(|address| matches!(address, IpAddr::V6(v6) if !v6.is_unicast_link_local()))
            .ok_or_else(|| format!("{name} has no global IPv6 address: leave out --ipv6, or give it one")),
        AddressChoice::Gid { index, option } => addresses().nth(index).ok_or_else(|| {
            format!(
                "{name} has {} GIDs, and {option} {index} is none of them: `rocinante devices` lists them",
                interface.addresses.len()
            )
        }),
    };
    found.map_err(|why| Failure::Of(Kind::Device, why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Patience;

    fn eth() -> Interface {
        let addresses = ["10.0.0.5", "fd00::5", "fe80::5"];
        Interface {
            name: "eth7".to_owned(),
            index: 7,
            mtu: 1500,
            mac: [2; 6],
            up: true,
            loopback: false,
            addresses: addresses.iter().map(|text| (text.parse().unwrap(), 64)).collect(),
        }
    }

    #[test]
    fn addresses_are_chosen_as_the_user_names_them() {
        let [v4, v6, local]: [IpAddr; 3] =
            ["10.0.0.5", "fd00::5", "fe80::5"].map(|text| text.parse().unwrap());
        let elsewhere = IpAddr::from([192, 0, 2, 1]);
        let gid = |index| AddressChoice::Gid { index, option: "-x" };
        for (choice, route, address) in [
            (AddressChoice::Any, v6, v6),
            (AddressChoice::Any, elsewhere, v4),
            (AddressChoice::Ipv6, v4, v6),
            (gid(0), v6, v4),
            (gid(2), v4, local),
        ] {
            assert_eq!(chosen(&eth(), choice, route), Ok(address), "{choice:?}");
        }
        let why = chosen(&eth(), gid(3), v4).unwrap_err().to_string();
        assert!(why.contains("-x 3") && why.contains("3 GIDs"), "{why}");
        let mut bare = eth();
        bare.addresses.truncate(1);
        assert!(chosen(&bare, AddressChoice::Ipv6, v4).unwrap_err().to_string().contains("--ipv6"));
    }

    #[test]
    fn an_interface_is_no_device_of_the_kernels() {
        let of = |device: Option<&str>, ib_dev: Option<&str>| {
            let [device, ib_dev] = [device, ib_dev].map(|name| name.map(str::to_owned));
            let device = OpenArgs { name: device, ..OpenArgs::default() };
            let patience = Patience::default();
            let net = NetArgs {
                host: None,
                device,
                bind: None,
                gid: AddressChoice::Any,
                port: 1,
                cm: false,
                persistent: false,
                patience,
            };
            kernel_device(&net, &DeviceArgs { ib_dev, ib_port: None })
        };
        assert_eq!(of(Some("lo"), None), None);
        assert_eq!(of(None, Some("lo")), None);
        assert_eq!(of(None, Some("mlx5_77")), None, "nor is what does not exist");
        assert_eq!(of(Some("mlx5_77"), None).as_deref(), Some("mlx5_77"), "opening it says so");
        assert_eq!(of(Some("hw"), None).as_deref(), Some("hw"));
    }
}
