//! `rocinante mckey`: sends to a multicast group or receives from it, like librdmacm's `mckey(1)`.
//! The other side is that program or `rocinante mckey`.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rocinante::cm;
use rocinante::verbs::{PeerPath, Qpn};
use serde::Serialize;

use crate::datagrams::{DatagramPlan, Node};
use crate::ending;
use crate::output::{Failure, Output};
use crate::session::{OpenArgs, Own, address};
use crate::size::size;

/// Send to a multicast group, or receive from it, like mckey
///
/// The other sides are `rocinante mckey` or mckey of librdmacm, over any network that RoCE v2 and
/// multicast pass.
///
/// Two terminals on one machine, without privileges: `rocinante mckey -m 239.1.2.3 -b 127.0.0.1`,
/// and then `rocinante mckey -m 239.1.2.3 -b 127.0.0.2 -s`.
///
/// Exit status: 0 if all went well, 1 if it did not, 2 if the command line makes no sense.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The group's address: 224.0.0.0/4 or ff00::/8
    #[arg(short, long, value_name = "ADDR", required_unless_present = "unmapped")]
    multicast: Option<IpAddr>,
    /// The group's GID instead: of an IPv6 group its address, of an IPv4 group the address as
    /// ::ffff:239.1.2.3
    #[arg(short = 'M', long, value_name = "GID", conflicts_with = "multicast")]
    unmapped: Option<Ipv6Addr>,
    /// The address or interface of the device to use [default: the one that the route to the group
    /// has]
    #[arg(short, long, value_name = "ADDR")]
    bind: Option<Own>,
    /// Send; else receive
    #[arg(short, long)]
    sender: bool,
    /// Number of queue pairs; the same at both sides
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    connections: u32,
    /// Number of messages that each queue pair sends, or receives
    #[arg(short = 'C', long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=65_536))]
    count: u32,
    /// Bytes of a message; a receiver's must not be less than the sender's
    #[arg(short = 'S', long, value_name = "BYTES", default_value_t = 100, value_parser = size::<0, { u32::MAX }>)]
    size: u32,
    /// Send without joining the group
    #[arg(short = 'o', long, requires = "sender")]
    send_only: bool,
    /// How long the sender waits before it sends, so that switches learn the members first, in
    /// seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u64).range(0..=3600))]
    pause: u64,
    /// How long a receiver waits for the next message, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    patience: u64,
    #[command(flatten)]
    device: OpenArgs,
    /// Print this process's counters at the end, also if it fails or a signal ends it
    #[arg(long)]
    counters: bool,
    /// End standard output with one JSON object on one line; all else goes to standard error
    #[arg(long)]
    json: bool,
}

/// The result of one side.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    role: &'static str,
    netdev: &'static str,
    local: IpAddr,
    group: IpAddr,
    connections: u32,
    size: u32,
    sent: u32,
    received: u32,
    seconds: f64,
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: args.json };
    ending::begin("rocinante mckey", out, args.counters);
    let result = play(args, out);
    if let Ok(report) = &result {
        out.line(format_args!("{} datagrams sent, {} received", report.sent, report.received));
    }
    out.end("rocinante mckey", &result)
}

impl Args {
    /// The group.
    fn group(&self) -> Result<IpAddr, Failure> {
        let named = self.multicast.or(self.unmapped.map(|gid| gid.to_canonical()));
        let group = named.ok_or_else(|| Failure::Usage("give a group, by -m or -M".into()))?;
        if !group.is_multicast() {
            return Err(Failure::Usage(format!(
                "{group} is no multicast group: they are 224.0.0.0/4 and ff00::/8"
            )));
        }
        Ok(group)
    }

    /// The own address.
    fn local(&self, group: IpAddr) -> Result<IpAddr, Failure> {
        let Some(own) = &self.bind else { return address::towards(SocketAddr::new(group, 0)) };
        own.towards(group).ok_or_else(|| {
            Failure::Usage(format!(
                "{group} and {} are of two families: give -b an address of the group's",
                own.name()
            ))
        })
    }
}

fn play(args: &Args, out: Output) -> Result<Report, Failure> {
    let group = args.group()?;
    let local = args.local(group)?;
    let ctx = args.device.open(local, out)?;
    let patience = Duration::from_secs(args.patience);
    // As in mckey: empty messages are not sent.
    let count = if args.size == 0 { 0 } else { args.count };
    let plan = DatagramPlan { count, size: args.size, patience };
    let mut nodes = Vec::new();
    for _ in 0..args.connections {
        let node = Node::new(&ctx, 0, plan)?;
        if !args.sender {
            node.post_receives()?;
        }
        if !args.send_only {
            node.qp.attach_mcast(group)?;
        }
        nodes.push(node);
    }
    if !args.send_only {
        out.note(format_args!("joined {group}"));
    }
    let start = Instant::now();
    if args.sender {
        ending::enter("pause");
        std::thread::sleep(Duration::from_secs(args.pause));
    }
    ending::enter("datagrams");
    let _attentive = ending::attentive();
    let mut transfer = || {
        if !args.sender {
            out.note(format_args!("receiving data transfers"));
            return nodes.iter_mut().try_for_each(Node::receive);
        }
        out.note(format_args!("initiating data transfers"));
        nodes.iter_mut().try_for_each(|node| {
            let ah = node.pd.create_ah(&PeerPath::new(group))?;
            node.send(ah.to(Qpn::MULTICAST, cm::UDP_QKEY))
        })
    };
    let transferred = transfer();
    let sum = |of: fn((u32, u32)) -> u32| nodes.iter().map(|node| of(node.counts())).sum();
    let report = Report {
        role: if args.sender { "sender" } else { "receiver" },
        netdev: ctx.provider().name(),
        local,
        group,
        connections: args.connections,
        size: args.size,
        sent: sum(|(sent, _)| sent),
        received: sum(|(_, received)| received),
        seconds: start.elapsed().as_secs_f64(),
    };
    transferred.inspect_err(|_| ending::add(&report))?;
    Ok(report)
}
