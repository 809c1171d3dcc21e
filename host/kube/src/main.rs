//! The command `rocinante-kube`.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use kube::Config;
use rocinante_kube::{ASSUMED_FOR, LEASE_FOR, Named, PERIOD, Places};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// RDMA bandwidth of Kubernetes' nodes: reserved, placed, and never promised twice.
///
/// The API server and its credentials are those of the pod, else of $KUBECONFIG.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve kube-scheduler below /scheduler/: filter, prioritize and bind. Any process that can
    /// connect may have pods bound, so let only schedulers.
    Extender {
        /// Where to listen, such as 127.0.0.1:8888 or :8888, which is all addresses.
        #[arg(long, value_name = "ADDRESS", value_parser = address)]
        listen: SocketAddr,
        /// Take the lease of another extender after these seconds of silence.
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=300))]
        #[arg(default_value_t = LEASE_FOR.as_secs())]
        lease: u64,
    },
    /// Publish this node's uplinks, and say at /getpfs what of them is taken.
    Node {
        /// The node's name in Kubernetes.
        #[arg(long, env = "NODE_NAME")]
        name: String,
        /// An interface, and the rate that can be reserved if it is not the interface's speed:
        /// ens1 or ens1=10G. Once for each uplink.
        #[arg(long, required = true, value_name = "INTERFACE[=RATE]")]
        uplink: Vec<Named>,
        /// Where to listen.
        #[arg(long, value_name = "ADDRESS", value_parser = address, default_value = ":54005")]
        listen: SocketAddr,
    },
    /// Offer the agent of this node to the kubelet, as a device plugin, and keep its uplinks as an
    /// extended resource of the node or as devices of dynamic resource allocation.
    Driver {
        /// The node's name in Kubernetes.
        #[arg(long, env = "NODE_NAME")]
        node: String,
        /// The agent's control socket.
        #[arg(long, value_name = "PATH", default_value = "/run/rocinante-agent/control.sock")]
        agent: PathBuf,
        /// The kubelet's folder.
        #[arg(long, value_name = "PATH", default_value = "/var/lib/kubelet")]
        kubelet: PathBuf,
        /// The folder of files of CDI. Containers get the device of the agent's file,
        /// rocinante.json, if it is there.
        #[arg(long, value_name = "PATH", default_value = "/etc/cdi")]
        cdi: PathBuf,
        /// How many containers may use the agent at a time.
        #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
        devices: u32,
        /// The scheduler sums the Mb/s of all uplinks, or shares of each.
        #[arg(long, value_enum, default_value = "extended-resource")]
        accounting: Accounting,
        /// The UID of this pod, which names its sockets: two drivers of a node have different ones.
        #[arg(long, env = "POD_UID", value_parser = uid, default_value = "0")]
        pod_uid: String,
        /// How often to look at the agent, in seconds, when there are no events.
        #[arg(long, value_name = "SECONDS", value_parser = period, default_value = "60")]
        period: Duration,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Accounting {
    ExtendedResource,
    Dra,
}

/// A part of the names of sockets, whose paths have few bytes.
fn uid(text: &str) -> Result<String, &'static str> {
    let is_part = |it: u8| it.is_ascii_alphanumeric() || it == b'-';
    let is_uid = (1..=36).contains(&text.len()) && text.bytes().all(is_part);
    is_uid.then(|| text.to_owned()).ok_or("1 to 36 letters, digits and '-'")
}

/// A time that is neither nothing nor for ever.
fn period(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|it| (0.01..=3600.0).contains(it));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "0.01 to 3600 seconds".to_owned())
}

/// An address with a port, or a port of all addresses.
fn address(text: &str) -> Result<SocketAddr, String> {
    match text.strip_prefix(':').map(str::parse) {
        Some(Ok(port)) => Ok((Ipv6Addr::UNSPECIFIED, port).into()),
        _ => text.parse().map_err(|_| "no address such as 127.0.0.1:8888 or :8888".to_owned()),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // The client logs each failed request as an error; the watches say so in words.
    let lines = Targets::new()
        .with_default(LevelFilter::WARN)
        .with_target("rocinante_kube", LevelFilter::INFO)
        .with_target("kube_client", LevelFilter::OFF);
    let written = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).without_time();
    tracing_subscriber::registry().with(written).with(lines).init();
    match run(arguments.command).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rocinante-kube: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(command: Command) -> Result<(), Box<dyn std::error::Error>> {
    let mut term = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let served = async {
        let client = rocinante_kube::client(Config::infer().await?)?;
        match command {
            Command::Extender { listen, lease } => {
                let (listener, lease) = (bound(listen).await?, Duration::from_secs(lease));
                rocinante_kube::extender(client, listener, ASSUMED_FOR, lease).await;
                return Err("another extender has the lease".into());
            }
            Command::Node { name, uplink, listen } => {
                // A wrong name is refused at once; an uplink that goes later is left out.
                uplink.iter().try_for_each(|it| it.uplink().map(drop))?;
                let listener = bound(listen).await?;
                let uplinks = || uplink.iter().filter_map(|it| it.uplink().ok()).collect();
                rocinante_kube::node(client, listener, &name, PERIOD, uplinks).await;
            }
            Command::Driver { node, agent, kubelet, cdi, devices, accounting, pod_uid, period } => {
                let dra = (accounting == Accounting::Dra).then_some(pod_uid);
                let places = Places { node, agent, kubelet, cdi, dra };
                rocinante_kube::driver(client, places, devices, period).await;
            }
        }
        Ok(())
    };
    tokio::select! {
        done = served => done,
        _ = term.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}

async fn bound(address: SocketAddr) -> Result<TcpListener, String> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.map_err(|error| format!("cannot listen at {address}: {error}"))?;
    let at = listener.local_addr().map_err(|error| error.to_string())?;
    // Standard output, for programs that chose port 0.
    println!("listening at {at}");
    Ok(listener)
}
