//! `rocinante capture`: what a container, or one of its queue pairs, sends and receives, as the
//! packets of a wire in a pcapng file.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rocinante_netdev::handed::Agent;
use rocinante_netdev::handed::page::SERVICES;
use rocinante_netdev::{Capture, Captured, Direction, Interface, Wanted};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::decode::file::Frame;
use crate::decode::frame::{LinkType, roce_datagram};
use crate::decode::rewrite::Rewriter;
use crate::ending;
use crate::output::{Failure, Kind, Output, Result};
use crate::policy::live;
use crate::stat::{self, Container, QueuePair, Source};

const PROGRAM: &str = "rocinante capture";
/// Ethernet, by tcpdump.org/linktypes.html.
const ETHERNET: LinkType = LinkType(1);
/// Queue pairs that the comment of a file names.
const NAMED_MAX: usize = 64;
/// The service whose queue pairs have many peers.
const UD: &str = SERVICES[2];
/// Frames between two looks at signals and the clock.
const BURST: usize = 256;
/// The most frames that are read at the end: no ring has more.
const RING_FRAMES: usize = 1 << 17;
/// How long to leave frames alone. Those of that time must have room in the ring.
const PAUSE: Duration = Duration::from_millis(1);

/// Capture what a container sends and receives, or one of its queue pairs, into a pcapng file
///
/// Taken at the host's end of its interface, whatever its backend, of UDP port 4791; without rights
/// inside the container itself, by the agent that ROCINANTE_AGENT says. Super-packets
/// are cut into the packets that a wire would carry. Comments of the file name the container, its
/// queue pairs and their peers, and what the kernel dropped because this command was too slow.
///
/// Exit status: 0 after --seconds, 1 if there is no such container or queue pair, or the file
/// cannot be written, 2 if the command line makes no sense, 128 plus its number for a signal. The
/// file is whole in each case but that it cannot be written: then it is removed.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The host's end of its interface, or, of an agent's, four characters at least of its engine's
    /// name for it; a process in it, or a name of `ip netns`; or an interface of this namespace
    /// [default: the container that this is in, by the agent]
    container: Option<String>,
    /// Only this queue pair, decimal or `0x`: packets to it, and those to its peer's, or of UD
    /// those from it
    #[arg(long, value_parser = crate::decode::select::qpn)]
    qp: Option<u32>,
    /// The file
    #[arg(short = 'w', long = "write", value_name = "FILE")]
    file: PathBuf,
    /// End after this time [default: at a signal]
    #[arg(long, value_parser = crate::perf::interval::seconds)]
    seconds: Option<Duration>,
    /// Keep this number of bytes of each packet, from the Ethernet header on [default: all]
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(64..=65_535))]
    snap: Option<u32>,
    /// Where the agent serves metrics, as of `rocinante stat`
    #[arg(long, value_name = "PLACE")]
    agent: Option<String>,
}

/// The aim of a capture.
struct Target {
    /// `None` for the first of this container, by its agent.
    interface: Option<Interface>,
    container: Container,
}

/// A capture that has begun.
struct Begun {
    from: Capture,
    /// The interface's name, on the host if an agent takes it.
    name: String,
    /// The interface's index here, if it is taken here.
    index: Option<u32>,
}

/// Runs the command.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    let out = Output { json: false };
    ending::attended(PROGRAM, out, || capture(args, out))
}

fn capture(args: &Args, out: Output) -> Result {
    let target = target(args)?;
    let wanted = match args.qp {
        Some(qpn) => wanted(&target.container, qpn)?,
        None => Wanted::All,
    };
    let Begun { mut from, name, index } = begin(&target, &wanted, args.snap)?;
    let unwritable = |error: std::io::Error| {
        if fs::symlink_metadata(&args.file).is_ok_and(|file| file.is_file()) {
            let _ = fs::remove_file(&args.file);
        }
        Failure::Failed(format!("{} cannot be written: {error}", args.file.display()))
    };
    let to = Rewriter::create(&args.file, std::path::Path::new("/dev/null"));
    let mut to = to.map_err(|error| {
        Failure::Failed(format!("{} cannot be written: {error}", args.file.display()))
    })?;
    let comment = comment(&target.container, args.qp);
    to.describe(ETHERNET, args.snap.unwrap_or(0), Some((&name, &comment))).map_err(unwritable)?;
    let whole = from.whole_because().map(|error| {
        let hint = match error.raw_os_error() {
            Some(libc::EPERM) => ", which needs CAP_BPF",
            _ => "",
        };
        format!("; the kernel copies whole frames, as it refuses a program{hint}: {error}")
    });
    out.note(format_args!("{PROGRAM}: {comment}, at {name}{}", whole.unwrap_or_default()));
    let (begun, mut ended, mut packets) = (Instant::now(), Ok(()), 0);
    while args.seconds.is_none_or(|seconds| begun.elapsed() < seconds) {
        ended = ending::check_signal();
        if ended.is_err() {
            break;
        }
        let mut taken = 0;
        while taken < BURST {
            let Some(wrote) = from.next(|it| write(&mut to, it, args.snap, &wanted)) else { break };
            packets += wrote.map_err(unwritable)?;
            taken += 1;
        }
        if let Err(error) = from.check()
            && let Some(why) = why_ended(&error, &name, index)
        {
            ended = Err(Failure::Failed(why));
            break;
        }
        if taken < BURST {
            // Each frame of a sender would wake it.
            std::thread::sleep(PAUSE);
        }
        if taken == 0 {
            to.flush().map_err(unwritable)?;
            let left = args.seconds.map_or(ending::LOOK, |all| all.saturating_sub(begun.elapsed()));
            wait(&from, left.min(ending::LOOK));
        }
    }
    let end = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    for _ in 0..RING_FRAMES {
        let one = from.next(|it| (it.time <= end).then(|| write(&mut to, it, args.snap, &wanted)));
        let Some(Some(wrote)) = one else { break };
        packets += wrote.map_err(unwritable)?;
    }
    let dropped = from.dropped();
    let lost = format!("the kernel dropped {dropped} frames, because {PROGRAM} was too slow");
    to.statistics(packets, dropped, &lost).map_err(unwritable)?;
    to.flush().map_err(unwritable)?;
    out.note(format_args!("{PROGRAM}: {packets} packets in {}; {lost}", args.file.display()));
    ended
}

/// Begins, by the agent where this process has no right to packet sockets: then only the own
/// container is captured. Error: neither can.
fn begin(target: &Target, wanted: &Wanted, snap: Option<u32>) -> Result<Begun> {
    if let Some(Interface { name, index, .. }) = &target.interface {
        match Capture::open(*index, wanted, snap) {
            Ok(from) => return Ok(Begun { from, name: name.clone(), index: Some(*index) }),
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
            Err(error) => {
                return Err(Failure::Failed(format!("cannot capture at {name}: {error}")));
            }
        }
    }
    let own = target.interface.as_ref();
    let agent = Agent::from_environment().map_err(Failure::Failed)?;
    let asked = match agent.path() {
        Some(path) => Capture::by_agent(path, own.map(|it| it.index), wanted, snap),
        None => Err("no agent is asked (ROCINANTE_AGENT is off)".into()),
    };
    let (from, name) = asked.map_err(|why| {
        let text = match own {
            Some(Interface { name, .. }) => {
                format!("cannot capture at {name}: be root, or have CAP_NET_RAW: {why}")
            }
            None => format!("cannot capture this container: {why}"),
        };
        Failure::Failed(text)
    })?;
    Ok(Begun { from, name, index: None })
}

/// The reason why no more frames come, if that is so.
fn why_ended(error: &std::io::Error, name: &str, index: Option<u32>) -> Option<String> {
    match index {
        None => Some(format!("the agent ended the capture at {name}, or the interface has gone")),
        // The kernel's error says no more than that the interface is down: it may come up again.
        Some(index) if Interface::by_name(name).is_ok_and(|it| it.index == index) => None,
        Some(_) => Some(format!("{name} is not there any more: {error}")),
    }
}

/// Writes the wanted packets of a frame; returns their number.
fn write(
    to: &mut Rewriter,
    it: Captured<'_>,
    snap: Option<u32>,
    wanted: &Wanted,
) -> std::io::Result<u64> {
    let time_ns = i128::try_from(it.time.as_nanos()).ok();
    let frame = Frame { number: 0, time_ns, link: ETHERNET, data: it.bytes };
    // The filter takes nothing else.
    let Ok(Some(datagram)) = roce_datagram(ETHERNET, it.bytes) else { return Ok(0) };
    to.write_run(&frame, &datagram, it.run, snap, |packet| wanted.has(packet))
}

/// Waits for frames.
fn wait(from: &Capture, limit: Duration) {
    let limit = Timespec::try_from(limit).unwrap_or_default();
    // An error comes again at the next look, which is at a signal.
    let _ = poll(&mut [PollFd::from_borrowed_fd(from.as_fd(), PollFlags::IN)], Some(&limit));
}

/// The container and its interface. Error: there is none of this name.
fn target(args: &Args) -> Result<Target> {
    let Some(name) = &args.container else {
        let here = Source::Pages.look(Some(&std::process::id().to_string()), true);
        let here = here.ok().and_then(|it| it.containers.into_iter().next());
        let container = here.unwrap_or_else(|| Container::called("this one"));
        return Ok(Target { interface: None, container });
    };
    let source = Source::of(args.agent.as_deref())?;
    if let (Source::Agent(_), Ok(moment)) = (&source, source.look(Some(name), true)) {
        let container = the_one(name, args.qp, moment.containers)?;
        return Ok(Target { interface: Some(by_name(&container.name)?), container });
    }
    // Its pages, whether or not an agent knows it.
    let pages = Source::Pages.look(Some(name), true).map(|it| it.containers.into_iter().next());
    let pages = pages.ok().flatten().unwrap_or_else(|| Container::called(name));
    match live::host_end(name) {
        Some(end) => Ok(Target { interface: Some(by_name(&end)?), container: pages }),
        None => {
            let interface = by_name(name)?;
            // Which of them is behind it nothing says but the number of a queue pair.
            let all = args.qp.and_then(|_| Source::Pages.look(None, true).ok());
            let all = all.map(|it| it.containers).unwrap_or_default();
            let container = stat::Container::of_all(name, all);
            Ok(Target { interface: Some(interface), container })
        }
    }
}

/// Of the interfaces that the word `name` means, the one that has the queue pair, or the only one.
/// Error: there are several.
fn the_one(name: &str, qp: Option<u32>, mut all: Vec<Container>) -> Result<Container> {
    let has = |it: &Container, qpn| it.queue_pairs.keys().any(|(_, number)| *number == qpn);
    if let Some(qpn) = qp
        && all.iter().any(|it| has(it, qpn))
    {
        all.retain(|it| has(it, qpn));
    }
    let names: Vec<String> = all.iter().map(|it| it.name.clone()).collect();
    match (all.pop(), &all[..]) {
        (Some(one), []) => Ok(one),
        _ => {
            let names = names.join(", ");
            Err(Failure::Usage(format!("{name} means several interfaces: name one of {names}")))
        }
    }
}

fn by_name(name: &str) -> Result<Interface> {
    Interface::by_name(name).map_err(|error| {
        Failure::Of(
            Kind::Device,
            format!("no container and no interface is called {name}: {error}"),
        )
    })
}

/// The datagrams of a queue pair. Error: there is none of this number, or it has no peer; or there
/// are several.
fn wanted(container: &Container, qpn: u32) -> Result<Wanted> {
    let found = container.queue_pairs.iter().filter(|((_, number), _)| *number == qpn);
    let found: Vec<&QueuePair> = found.map(|(_, qp)| qp).collect();
    let name = &container.name;
    let lists = format!("`rocinante stat --qps {name}` lists them");
    let [qp] = found[..] else {
        let text = match found.len() {
            0 => format!("{name} has no queue pair {qpn}: {lists}"),
            count => {
                format!("{count} queue pairs are {qpn}: name their container, not an interface")
            }
        };
        return Err(Failure::Failed(text));
    };
    if qp.service == UD {
        return Ok(Wanted::Datagrams(qpn));
    }
    let Some(peer) = qp.peer else {
        let text = format!("queue pair {qpn} has no peer: capture all of {name}, without --qp");
        return Err(Failure::Failed(text));
    };
    Ok(Wanted::Directions([
        Direction { peer, from_peer: true, to_qpn: qpn },
        Direction { peer, from_peer: false, to_qpn: qp.peer_number },
    ]))
}

/// The container with its queue pairs and their peers, or one of them.
fn comment(container: &Container, qp: Option<u32>) -> String {
    let Container { name, id, queue_pairs, .. } = container;
    let id = id.as_ref().map(|id| format!(" ({id})")).unwrap_or_default();
    let wanted = queue_pairs.iter().filter(|((_, number), _)| qp.is_none_or(|qp| qp == *number));
    let all = wanted.clone().count();
    let named = wanted.take(NAMED_MAX).map(|((_, number), it)| {
        let QueuePair { peer, peer_number, service, .. } = it;
        match peer {
            Some(peer) => {
                format!(", queue pair {number} ({service}) with {peer} queue pair {peer_number}")
            }
            None => format!(", queue pair {number} ({service})"),
        }
    });
    let named: String = named.collect();
    let more = all.saturating_sub(NAMED_MAX);
    let more = if more > 0 { format!(", and {more} more queue pairs") } else { String::new() };
    format!("container {name}{id}{named}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(pairs: &[(&str, u32, Option<&str>)]) -> Container {
        let mut it = Container::called("veth0");
        for (device, number, peer) in pairs {
            let peer = peer.map(|peer| peer.parse().expect("an address"));
            let qp = QueuePair { peer, peer_number: 9, service: "RC".into(), ..Default::default() };
            it.queue_pairs.insert(((*device).to_owned(), *number), qp);
        }
        it
    }

    #[test]
    fn a_word_means_one_interface() {
        let [mut first, mut second] = [(); 2].map(|()| container(&[("a", 5, None)]));
        (first.name, second.name) = ("veth1".into(), "veth2".into());
        let only = the_one("abcd", None, vec![first.clone()]).expect("one");
        assert_eq!(only.name, "veth1");
        for qp in [None, Some(5), Some(6)] {
            let error = the_one("abcd", qp, vec![first.clone(), second.clone()]).unwrap_err();
            assert!(error.to_string().contains("name one of veth1, veth2"), "{error}");
        }
        second.queue_pairs.clear();
        let has = the_one("abcd", Some(5), vec![second, first]).expect("one has it");
        assert_eq!(has.name, "veth1");
    }

    #[test]
    fn a_queue_pair_is_the_only_one_of_its_number_and_has_a_peer() {
        let all = container(&[
            ("a", 5, Some("10.0.0.2")),
            ("a", 6, None),
            ("a", 7, Some("fd00::1")),
            ("b", 7, None),
        ]);
        let five = wanted(&all, 5).expect("it is there");
        let Wanted::Directions([from, to]) = five else { panic!("{five:?}") };
        assert_eq!((from.from_peer, from.to_qpn, to.from_peer, to.to_qpn), (true, 5, false, 9));
        for (number, why) in [(4, "no queue pair 4"), (6, "no peer"), (7, "2 queue pairs")] {
            let error = wanted(&all, number).expect_err("none").to_string();
            assert!(error.contains(why), "{error}");
        }
        let mut one = container(&[("a", 6, None)]);
        one.queue_pairs.values_mut().for_each(|qp| qp.service = "UD".into());
        assert_eq!(wanted(&one, 6), Ok(Wanted::Datagrams(6)));
    }

    #[test]
    fn the_comment_names_what_is_captured() {
        let all = container(&[("a", 5, Some("10.0.0.2")), ("a", 6, None)]);
        let five = "container veth0, queue pair 5 (RC) with 10.0.0.2 queue pair 9";
        assert_eq!(comment(&all, Some(5)), five);
        assert_eq!(comment(&all, None), format!("{five}, queue pair 6 (RC)"));
        let many: Vec<_> = (0..70).map(|number| ("a", number, None)).collect();
        assert!(comment(&container(&many), None).ends_with(", and 6 more queue pairs"));
    }
}
