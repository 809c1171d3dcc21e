//! The experiments of a study.

use super::plan::{BRIDGE, Carrier, Mode};
use crate::chart::bytes;

/// The `x` of the rows of `control` that are of no asked rate.
pub(super) const VERDICTS: u64 = 0;
pub(super) const RULES: u64 = 1;

/// Measurements over one quantity, `x`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Experiment {
    Size,
    Scale,
    Load,
    ManyToOne,
    Isolation,
    Starvation,
    Failure,
    Start,
    Control,
    Rate,
    Pressure,
}

/// An event that disturbs a connection. Its place in [`Event::ALL`] is the `x` of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    KilledPeer,
    PulledLink,
    RestartedAgent,
    MovedContainer,
}

impl Event {
    pub(super) const ALL: [Self; 4] =
        [Self::KilledPeer, Self::PulledLink, Self::RestartedAgent, Self::MovedContainer];

    pub(super) fn of(x: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(x).ok()?).copied()
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::KilledPeer => "killed peer",
            Self::PulledLink => "pulled link",
            Self::RestartedAgent => "restarted agent",
            Self::MovedContainer => "moved container",
        }
    }

    /// Whether it can disturb this mode here. A move of an agent's container takes two agents.
    pub(super) const fn has(self, mode: &Mode) -> bool {
        match self {
            Self::KilledPeer | Self::PulledLink => true,
            Self::RestartedAgent => mode.is_handed(),
            Self::MovedContainer => !mode.is_handed(),
        }
    }
}

impl Experiment {
    pub(super) const ALL: [Self; 11] = [
        Self::Size,
        Self::Scale,
        Self::Load,
        Self::ManyToOne,
        Self::Isolation,
        Self::Starvation,
        Self::Failure,
        Self::Start,
        Self::Control,
        Self::Rate,
        Self::Pressure,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Size => "size",
            Self::Scale => "scale",
            Self::Load => "load",
            Self::ManyToOne => "many_to_one",
            Self::Isolation => "isolation",
            Self::Starvation => "starvation",
            Self::Failure => "failure",
            Self::Start => "start",
            Self::Control => "control",
            Self::Rate => "rate",
            Self::Pressure => "pressure",
        }
    }

    pub(super) const fn about(self) -> &'static str {
        match self {
            Self::Size => {
                "Throughput of WRITE, SEND and READ, and half the round trip of a WRITE. TCP has \
                 its stream in the place of WRITEs, UCX tagged messages in that of SENDs and of \
                 the round trip."
            }
            Self::Scale => {
                "Pairs of containers that send at once, 64 KiB each time, all sleeping for \
                 completions, with an ACK timeout of 18, and a probe pair beside them: half a \
                 round trip of 64 B. Memory of processes is private; that of the kernel is all \
                 else that the machine lost while they started, which other programs can disturb."
            }
            Self::ManyToOne => {
                "Containers that send to one, 64 KiB each time, all sleeping for completions: the \
                 sum, Jain's index, and connections that ended by error."
            }
            Self::Isolation => {
                "A probe pair beside neighbours that send at full rate, as in scale: with 0 \
                 neighbours it is alone."
            }
            Self::Starvation => {
                "A pair and a probe beside programs that never sleep, with the ACK timeouts 14 and \
                 18: connections that ended by error, and what the pair carried."
            }
            Self::Failure => {
                "A connection that sends one message of 64 B after the other, with an ACK timeout \
                 of 14 and 7 retries, when its peer is killed, the receiver's link is down until \
                 the error or for 5 s, the agent is killed and started again, or the receiver's \
                 addresses move to another host. error: from then until the sender gets an error. \
                 stall: without an error, the longest time that a message took. again: from the \
                 event, or from the return of the link, until two new programs, which start after \
                 the error, have moved a message. A move in a mode with an agent is not measured: \
                 it takes an agent on each host."
            }
            Self::Start => {
                "Programs that start at once, each in a container of its own, in pairs. first \
                 byte: from the start of the first program until a pair has moved a message. \
                 attach: opening the device. With podman each is in a \
                 container that starts then. The backends are those that the programs got. With \
                 the fewest programs also: from making two containers and their host to the first \
                 byte; connections that are made and ended, 32 at a time (TCP: one at a time); \
                 1,000 held at once."
            }
            Self::Control => {
                "verdicts: the controls of `rocinante policy-check`, with how many act as \
                 documented. 100 rules: what a pair carries without rules on the bridge, and with \
                 a hundred that each packet passes. Else a token bucket towards the receiver: the \
                 rate on the wire that it let pass, by its own counter, and that by the rate asked."
            }
            Self::Rate => {
                "WRITEs of 64 B at the highest rate, of 1 to 8 threads that share the queue pairs. \
                 TCP has streams, whose messages are calls."
            }
            Self::Pressure => {
                "Packets of one message and its acknowledgement or answer, both ways, on a link \
                 without super-packets, and their bytes beside the payload, Ethernet headers \
                 included, which the kernel leaves out of its counters for AF_XDP. Entries that the connection adds to the host's connection tracking and \
                 to the sender's neighbours; addresses of a container, and its link-layer \
                 addresses that the bridge has learnt."
            }
            Self::Load => {
                "Latency against offered load, open loop: reads of 4 KiB at planned times, which \
                 latency counts from. Over TCP a process answers."
            }
        }
    }

    /// The name of its `x`.
    pub(super) const fn x(self) -> &'static str {
        match self {
            Self::Size | Self::Pressure => "bytes",
            Self::Scale => "pairs",
            Self::Load => "% of its peak",
            Self::ManyToOne => "senders",
            Self::Isolation => "neighbours",
            Self::Starvation => "busy loops",
            Self::Failure => "event",
            Self::Start => "programs",
            Self::Control => "Mb/s asked",
            Self::Rate => "queue pairs",
        }
    }

    /// A point of its `x`.
    pub(super) fn point(self, x: u64) -> String {
        match self {
            Self::Size | Self::Pressure => match bytes(&(x as f64)) {
                size if size.ends_with('i') => size + "B",
                size => size + " B",
            },
            Self::Load => format!("{x} %"),
            Self::Failure => Event::of(x).map_or_else(|| x.to_string(), |it| it.name().into()),
            Self::Control if x == VERDICTS => "verdicts".into(),
            Self::Control if x == RULES => "100 rules".into(),
            Self::Control => format!("{x} Mb/s"),
            _ => format!("{x} {}", self.x()),
        }
    }

    /// Whether it runs pairs of containers.
    pub(super) const fn is_paired(self) -> bool {
        matches!(self, Self::Scale | Self::Isolation | Self::Starvation | Self::Control)
    }

    /// Whether it has this mode. Many processes that spin would measure the scheduler.
    pub(super) fn has(self, mode: &Mode) -> bool {
        let spins = matches!(mode.carrier, Carrier::Tcp { spin: true } | Carrier::Iperf3);
        let is_ours = !mode.is_kernel() && !mode.is_programs() && !mode.is_contained();
        let of_containers = mode.link == BRIDGE && is_ours && !spins;
        match self {
            Self::Size => true,
            Self::Start if mode.is_contained() => true,
            Self::Scale
            | Self::ManyToOne
            | Self::Isolation
            | Self::Starvation
            | Self::Failure
            | Self::Start
            | Self::Control => of_containers,
            Self::Rate => of_containers || mode.is_kernel(),
            // The agent's ports send the same packets.
            Self::Pressure => of_containers && !mode.is_handed(),
            Self::Load => {
                let sleeps = matches!(mode.carrier, Carrier::Tcp { spin: false } | Carrier::Iperf3);
                (is_ours || mode.is_kernel()) && !sleeps
            }
        }
    }
}
