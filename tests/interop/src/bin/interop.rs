//! The program for a machine with a device of the kernel, such as the guest: `agent` serves
//! scenarios; `check`, `open` and `watch` try the device; `control` obeys the host of the guest.
//! Against such a machine, `device` runs the whole matrix, and `rocinante` is the command of that
//! name, as is this program under that name.

use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rocinante_interop::hardware::checks;
use rocinante_interop::{agent, card, guest, links};
use rocinante_lab::kill_children_on_signal;

/// Rocinante and the RDMA devices of the kernel, tried with each other
#[derive(Debug, Parser)]
#[command(name = "rocinante-interop")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve scenarios with this machine's RDMA devices, to everybody that reaches the address
    Agent {
        /// Where to listen
        #[arg(default_value_t = format!("[::]:{}", agent::PORT))]
        address: String,
    },
    /// Try an RDMA device of this machine by itself
    Check {
        /// A check's name, or `all`
        check: String,
        /// The device, such as `mlx5_0`
        device: String,
        /// One of its addresses
        address: IpAddr,
    },
    Device(card::Args),
    #[command(hide = true)]
    Control,
    #[command(hide = true)]
    Open {
        device: String,
        address: IpAddr,
        bytes: usize,
        user: u32,
        #[arg(long)]
        listen: bool,
    },
    #[command(hide = true)]
    Watch {
        device: String,
        address: IpAddr,
        seconds: u16,
    },
    #[command(hide = true)]
    Gone {
        device: String,
        address: IpAddr,
    },
    #[command(hide = true)]
    Departures {
        device: String,
        ns_per_byte: u16,
    },
    #[command(hide = true)]
    NetkitL2 {
        name: String,
        peer: String,
    },
    /// The command `rocinante`
    Rocinante,
}

fn main() -> ExitCode {
    rocinante_tests::verbs::death::be_the_peer_if_asked();
    let mut args = std::env::args_os().peekable();
    let name = args.peek().map(|own| Path::new(own).file_name().unwrap_or_default());
    if name == Some("rocinante".as_ref()) {
        return rocinante_cli::command::run(args);
    }
    args.next();
    if args.peek().is_some_and(|word| word == "rocinante") {
        return rocinante_cli::command::run(args);
    }
    let done = match Cli::parse().command {
        Command::Agent { address } => serve(&address),
        Command::Check { check, device, address } if check == "all" => {
            checks::run_all(&device, address)
        }
        Command::Check { check, device, address } => checks::run(&check, &device, address),
        Command::Device(args) => return card::run(&args),
        Command::Control => guest::control::serve().map_err(|error| error.to_string()),
        Command::Open { device, address, bytes, user, listen } => {
            checks::open(&device, address, bytes, user, listen)
        }
        Command::Watch { device, address, seconds } => checks::watch(&device, address, seconds),
        Command::Gone { device, address } => checks::gone(&device, address),
        Command::Departures { device, ns_per_byte } => {
            let done = links::departures(&device, ns_per_byte);
            done.map(|never| match never {}).map_err(|error| error.to_string())
        }
        Command::NetkitL2 { name, peer } => {
            links::netkit_l2(&name, &peer).map_err(|error| error.to_string())
        }
        Command::Rocinante => Ok(()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rocinante-interop: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(address: &str) -> Result<(), String> {
    kill_children_on_signal().map_err(|error| error.to_string())?;
    agent::serve(address).map_err(|error| {
        format!("cannot listen on {address}: {error}: is an agent there already, or is it no address of this machine?")
    })
}
