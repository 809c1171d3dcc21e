//! `mckey` of librdmacm at both ends: either sends to a group that the other has joined.
//!
//! `mckey` destroys its address handle and its queue pair as soon as it has posted. Datagrams of
//! the guest's that have not left by then never do. In each of six runs with 200 datagrams, all or
//! all but one were lost. So the guest's program is delayed until the kernel has sent. The device's
//! counter has the number of packets that have left: all of them must arrive. If some have not
//! left, the receiver waits for ever, and both begin again.

use super::place::CmPlace;
use crate::matrix::node::Step;

/// Datagrams that our program sends, and that the guest's waits for.
const FROM_US: usize = 25;
/// Datagrams that the guest's program sends: Soft-RoCE sends 64 before it waits.
const FROM_THEM: usize = 40;
/// How often the guest's program is tried that did not send all.
const TRIES: u32 = 5;

impl CmPlace<'_> {
    /// A group that no other cell of this guest uses.
    fn group(&self) -> [u8; 4] {
        let [high, low] = self.port.to_be_bytes();
        [239, 81, high & 0x7f, low]
    }

    pub(super) fn we_send(&self) -> Step {
        let group = self.group();
        let name = std::net::Ipv4Addr::from(group);
        let line = format!("mckey -m {name} -b {} -C {FROM_US} -S 700", self.there);
        let receiver = self.start(&line)?;
        self.until("the guest joins", || {
            Ok(names(&self.guest("cat /proc/net/igmp")?.stdout, group))
        })?;
        let ours = self.run(&format!("mckey -m {name} -b {{here}} -s -C {FROM_US} -S 700"))?;
        let ours = ours.finish()?;
        let theirs = receiver.wait().map_err(|error| error.to_string())?;
        // A receiver ends once all have come.
        let fine = (ours.code, theirs.code) == (0, 0)
            && ours.stdout.contains("return status 0")
            && theirs.stdout.contains("data transfers complete");
        if fine { Ok(()) } else { Err(format!("ours: {ours:?}; theirs: {theirs:?}")) }
    }

    pub(super) fn they_send(&self) -> Step {
        let group = self.group();
        let name = std::net::Ipv4Addr::from(group);
        let there = self.there;
        for attempt in 1..=TRIES {
            let receiver =
                self.run(&format!("mckey -m {name} -b {{here}} -C {FROM_THEM} -S 700"))?;
            self.until("ours joins", || self.have_joined(group))?;
            let before = self.sent()?;
            let line = format!("mckey -m {name} -b {there} -s -C {FROM_THEM} -S 700");
            let theirs = self.guest(&yielding(&line))?;
            let sent = self.sent()? - before;
            let all =
                |ours| format!("{sent} packets have left; ours: {ours:?}; theirs: {theirs:?}");
            if theirs.code != 0 || !theirs.stdout.contains("data transfers complete") || sent == 0 {
                return Err(all(None));
            }
            if sent < FROM_THEM && attempt < TRIES {
                println!("mckey: {sent} of {FROM_THEM} datagrams have left the guest, again");
                drop(receiver);
                self.until("ours leaves", || Ok(!self.have_joined(group)?))?;
                continue;
            }
            let ours = receiver.finish()?;
            let fine = ours.code == 0 && ours.stdout.contains("data transfers complete");
            return if fine { Ok(()) } else { Err(all(Some(ours))) };
        }
        Ok(())
    }

    /// The number of packets that the guest's device has sent.
    fn sent(&self) -> Step<usize> {
        let counter =
            format!("cat /sys/class/infiniband/{}/ports/1/hw_counters/sent_pkts", self.device);
        let said = self.guest(&counter)?;
        said.stdout.trim().parse().map_err(|_| format!("no counter: {said:?}"))
    }

    fn have_joined(&self, group: [u8; 4]) -> Step<bool> {
        let groups = self.netns.run(|| std::fs::read_to_string("/proc/thread-self/net/igmp"));
        let groups =
            groups.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        Ok(names(&groups, group))
    }
}

/// A command of the guest that gives way to the kernel's senders. The command and the senders share
/// one processor (Soft-RoCE sends from an unbound work queue), and the senders go first.
fn yielding(line: &str) -> String {
    const MASK: &str = "/sys/devices/virtual/workqueue/cpumask";
    format!(
        "old=$(cat {MASK}) && echo 1 > {MASK} && taskset 1 chrt --idle 0 {line}; code=$?; echo $old > {MASK}; exit $code"
    )
}

/// Whether the kernel's list, which is in the machine's byte order, contains a group.
fn names(igmp: &str, group: [u8; 4]) -> bool {
    igmp.contains(&format!("{:08X}", u32::from_ne_bytes(group)))
}
