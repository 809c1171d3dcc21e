//! The choice of the device: options of every command that opens one.

use std::ffi::OsStr;
use std::net::{IpAddr, SocketAddr};

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, Command};
use rocinante::device::{Backend, DEVICE_VARIABLE};
use rocinante::{Context, OpenOptions, VerbsError};

use super::address;
use super::own::Own;
use crate::ending;
use crate::output::{Failure, Kind, Output};

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
        let words = [("--netdev", netdev), ("--device", self.name.clone()), ("--shards", shards)];
        let given = words.into_iter().filter_map(|(option, word)| Some([option.into(), word?]));
        given.flatten().collect()
    }

    /// Opens the device from which `server` is reached, or the one with the address `own`.
    ///
    /// # Errors
    /// There is no route, or the device cannot be opened.
    pub fn open_towards(
        &self,
        server: SocketAddr,
        own: Option<&Own>,
        out: Output,
    ) -> Result<Context, Failure> {
        self.open(address::local(server, own)?, out)
    }

    /// The device that the user named.
    pub(super) fn named(&self) -> Option<String> {
        let variable = || std::env::var(DEVICE_VARIABLE).ok();
        self.name.clone().or_else(variable).filter(|name| !name.is_empty())
    }

    /// Opens the device in software of an interface, with all its addresses.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_interface(&self, name: &str, out: Output) -> Result<Context, Failure> {
        self.open_by(|options| options.open_interface(name), name, out)
    }

    /// Opens the device with `address`. Prints its name and the reason for its backend.
    ///
    /// # Errors
    /// There is no such device, or the backend is not available. The text says what to do.
    pub fn open(&self, address: IpAddr, out: Output) -> Result<Context, Failure> {
        self.open_by(|options| options.open(address), &address.to_string(), out)
    }

    fn open_by(
        &self,
        open: impl FnOnce(OpenOptions) -> Result<Context, VerbsError>,
        place: &str,
        out: Output,
    ) -> Result<Context, Failure> {
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
        let ctx = open(options).map_err(no_device)?;
        ending::opened(&ctx);
        if self.shards.is_some_and(|count| count != ctx.shards()) {
            let why = format!("{} is a device of the kernel: leave out --shards", ctx.name());
            return Err(Failure::Usage(why));
        }
        let (name, why) = (ctx.name(), &ctx.query_device().chosen_because);
        match ctx.shards() {
            1 => out.note(format_args!("device {name} at {place}, {why}")),
            count => out.note(format_args!("device {name} at {place}, {count} shards, {why}")),
        }
        Ok(ctx)
    }
}

/// The failure of a device that is not there, or cannot be opened.
#[must_use]
pub fn no_device(error: impl Into<Failure>) -> Failure {
    match error.into() {
        Failure::Failed(why) => Failure::Of(Kind::Device, why),
        failure => failure,
    }
}
