//! The measures.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The subject of a figure. Its name in JSON is the variant's, in snake case.
///
/// The target is the side that only answers. It is active if its program drives the device. It is
/// passive if the program sleeps and the device's background thread answers. It is asleep if that
/// thread sleeps, too, because the requests come far apart.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ValueEnum,
)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Measure {
    /// WRITEs in one direction: goodput.
    WriteBw,
    /// The same, to a passive target.
    WriteBwPassive,
    /// The same in both directions at once: the sum of both.
    WriteBwBoth,
    /// The same as `write_bw` with receive buffers of 212,992 bytes.
    WriteBwSmallBuffers,
    /// Jain's index of the queue pairs' shares of `write_bw`: 1 if all are equal.
    WriteBwFairness,
    /// As `write_bw`, with 16 outstanding on each queue pair, however many there are.
    WriteBwQueued,
    /// Jain's index of the queue pairs' shares of `write_bw_queued`.
    WriteBwQueuedFairness,
    /// Payload bits of `write_bw_passive`, or of a TCP stream, for each second of processor time:
    /// that of both processes and the system's in softirqs.
    WriteBwPerCore,
    /// WRITEs of many processes, each in a network namespace of its own, to one: the sum.
    FanIn,
    /// Jain's index of the processes' shares of `fan_in`.
    FanInFairness,
    /// The number of their queue pairs that ended in an error.
    FanInErrors,
    /// The number of packets that they sent again.
    FanInRetransmits,
    /// SENDs in one direction: goodput.
    SendBw,
    /// READs: goodput.
    ReadBw,
    /// Small WRITEs in one direction, at the highest rate.
    WriteRate,
    /// The same, to a passive target.
    WriteRatePassive,
    /// The same as `write_rate`, each posted by itself.
    WriteRateSingle,
    /// Datagrams of a queue pair of type UD that arrive at another.
    UdRate,
    /// The same as `write_rate` with receive buffers of 212,992 bytes.
    WriteRateSmallBuffers,
    /// WRITEs to and fro, one in 16 signaled, both sides polling memory and driving the device:
    /// half the round trip.
    WriteLat,
    /// What 99 % of the times of `write_lat` are at most.
    WriteLatP99,
    /// What 99.9 % of them are at most.
    WriteLatP999,
    /// The same as `write_lat`, each WRITE signaled.
    WriteLatSignaled,
    /// The same as `write_lat`, both processes on one processor.
    WriteLatOneCpu,
    /// The same as `write_lat`, both sides only polling memory, without any call of the verbs.
    WriteLatMemory,
    /// SENDs to and fro, both sides sleeping on a completion channel: half the round trip.
    SendLatBlocking,
    /// A READ: from the post to the completion.
    ReadLat,
    /// The same, from a passive target, one after the other.
    ReadLatPassive,
    /// The same, from a target that is asleep.
    ReadLatAsleep,
    /// The same, from a passive target on the same processor, one after the other.
    ReadLatOneCpu,
    /// A fetch and add: from the post to the completion.
    AtomicLat,
    /// The same, at a passive target, one after the other.
    AtomicLatPassive,
    /// The same, at a target that is asleep.
    AtomicLatAsleep,
    /// The extra time of a UDP socket's answer if its process sleeps until the question comes.
    WakeUp,
    /// Processor time, in user and kernel mode, of the processes of both ends for 10⁹ bytes of
    /// payload, to a passive target.
    CpuPerGb,
    /// Processor time of the whole machine for 10⁹ bytes of payload.
    MachineCpuPerGb,
    /// The same, to a passive target.
    MachineCpuPerGbPassive,
    /// Resident memory per connected queue pair of 16 sends and 16 receives.
    QpBytes,
    /// How often a device's threads wake up while nothing happens on 1,000 connected queue pairs.
    IdleWakeups,
}

/// How the answering side works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// Its program drives the device.
    Active,
    /// Its program sleeps.
    Passive,
    /// Its program and the device's thread both sleep when a request comes.
    Asleep,
}

impl Measure {
    /// Its name in JSON.
    #[must_use]
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// The unit of its values.
    #[must_use]
    pub const fn unit(self) -> &'static str {
        match self {
            Self::WriteBw
            | Self::WriteBwPassive
            | Self::WriteBwBoth
            | Self::WriteBwSmallBuffers
            | Self::WriteBwQueued
            | Self::WriteBwPerCore
            | Self::FanIn
            | Self::SendBw
            | Self::ReadBw => "Gb/s",
            Self::WriteRate
            | Self::WriteRatePassive
            | Self::WriteRateSingle
            | Self::WriteRateSmallBuffers
            | Self::UdRate => "Mop/s",
            Self::WriteBwFairness | Self::WriteBwQueuedFairness | Self::FanInFairness => "1",
            Self::FanInErrors => "queue pairs",
            Self::FanInRetransmits => "packets",
            Self::CpuPerGb | Self::MachineCpuPerGb | Self::MachineCpuPerGbPassive => "s/GB",
            Self::QpBytes => "B",
            Self::IdleWakeups => "1/s",
            _ => "us",
        }
    }

    /// Whether more is better.
    #[must_use]
    pub fn rises(self) -> bool {
        matches!(self.unit(), "Gb/s" | "Mop/s" | "1")
    }

    /// The measure of the same with small receive buffers, if there is one.
    #[must_use]
    pub const fn with_small_buffers(self) -> Option<Self> {
        match self {
            Self::WriteBw => Some(Self::WriteBwSmallBuffers),
            Self::WriteRate => Some(Self::WriteRateSmallBuffers),
            _ => None,
        }
    }

    /// Whether it measures one side's requests, each posted after the previous one completed.
    #[must_use]
    pub const fn is_whole_round_trip(self) -> bool {
        matches!(
            self,
            Self::ReadLat
                | Self::ReadLatPassive
                | Self::ReadLatAsleep
                | Self::ReadLatOneCpu
                | Self::AtomicLat
                | Self::AtomicLatPassive
                | Self::AtomicLatAsleep
        )
    }

    /// Whether both processes have the same processor.
    pub(crate) const fn is_on_one_cpu(self) -> bool {
        matches!(self, Self::WriteLatOneCpu | Self::ReadLatOneCpu)
    }

    /// Whether many processes send to one.
    pub(crate) const fn is_fan_in(self) -> bool {
        matches!(
            self,
            Self::FanIn | Self::FanInFairness | Self::FanInErrors | Self::FanInRetransmits
        )
    }

    pub(crate) const fn target(self) -> Target {
        match self {
            Self::WriteBwPassive
            | Self::WriteBwPerCore
            | Self::CpuPerGb
            | Self::WriteRatePassive
            | Self::ReadLatPassive
            | Self::ReadLatOneCpu
            | Self::AtomicLatPassive => Target::Passive,
            Self::ReadLatAsleep | Self::AtomicLatAsleep => Target::Asleep,
            _ => Target::Active,
        }
    }
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// One measurement of a pair of processes. It may have several figures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The measure.
    pub measure: Measure,
    /// Bytes of each message.
    pub size: usize,
    /// Time of measuring, in seconds.
    pub seconds: f64,
}

/// One measured value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// The measure.
    pub measure: Measure,
    /// Bytes of each message.
    pub size: usize,
    /// The value in units of [`Measure::unit`].
    pub value: f64,
}

impl Step {
    /// The measures of its figures.
    pub(crate) fn figures(&self) -> impl Iterator<Item = Measure> + use<> {
        let more: &[Measure] = match self.measure {
            Measure::WriteBw => &[Measure::MachineCpuPerGb, Measure::WriteBwFairness],
            Measure::WriteBwQueued => &[Measure::WriteBwQueuedFairness],
            Measure::WriteBwPassive => {
                &[Measure::CpuPerGb, Measure::WriteBwPerCore, Measure::MachineCpuPerGbPassive]
            }
            Measure::WriteLat => &[Measure::WriteLatP99, Measure::WriteLatP999],
            Measure::FanIn => {
                &[Measure::FanInFairness, Measure::FanInErrors, Measure::FanInRetransmits]
            }
            Measure::IdleWakeups => &[Measure::QpBytes],
            _ => &[],
        };
        std::iter::once(self.measure).chain(more.iter().copied())
    }

    pub(crate) const fn figure(&self, measure: Measure, value: f64) -> Figure {
        Figure { measure, size: self.size, value }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_json_and_on_the_command_line_are_the_same() {
        for measure in Measure::value_variants() {
            assert_eq!(serde_json::to_value(measure).unwrap(), measure.name());
            assert_eq!(Measure::from_str(&measure.name(), false).as_ref(), Ok(measure));
            let falls = ["us", "s/GB", "B", "1/s", "queue pairs", "packets"];
            assert!(measure.rises() || falls.contains(&measure.unit()));
        }
    }
}
