//! Captures that the agent takes for programs without rights.

use std::net::{IpAddr, UdpSocket};
use std::path::Path;

use rocinante_netdev::{Capture, Interface, Wanted};
use rustix::process::Signal;

use crate::asker::{Asker, connected, eventually};
use crate::lab::{Host, host_or_skip};
use crate::reload::reload;

/// The captures of a program.
#[derive(Default)]
pub(crate) struct Captures(Vec<Capture>);

impl Captures {
    /// Begins one, at an interface that is named or at the first; says how many frames the last one
    /// has had and lost, and whether it has ended; or ends all.
    pub(crate) fn obey(&mut self, agent: &Path, way: &str, at: Option<&str>) -> String {
        match way {
            "capture" => {
                let by_name = |name: &str| Interface::by_name(name).map_or(u32::MAX, |it| it.index);
                match Capture::by_agent(agent, at.map(by_name), &Wanted::All, None) {
                    Ok((capture, end)) => {
                        self.0.push(capture);
                        format!("at {end}")
                    }
                    Err(why) => format!("none: {why}"),
                }
            }
            "taken" => {
                let last = self.0.last_mut().expect("a capture");
                let frames = std::iter::from_fn(|| last.next(|_| ())).count();
                let state = if last.check().is_ok() { "goes on" } else { "ended" };
                format!("{frames} {} {state}", last.dropped())
            }
            _ => {
                self.0.clear();
                "done".into()
            }
        }
    }
}

/// Frames that it has had since the last look, those that were lost, and whether it goes on.
fn taken(asker: &mut Asker) -> (u64, u64, bool) {
    let said = asker.tell("taken");
    let words: Vec<&str> = said.split(' ').collect();
    let [frames, lost] = [0, 1].map(|nth| words[nth].parse().expect("a number"));
    (frames, lost, words[2] == "goes")
}

/// Sends datagrams to a container from the third.
fn send(host: &Host, to: IpAddr, count: usize, len: usize) {
    let sent = host.container(2).run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        (0..count).try_for_each(|_| socket.send_to(&vec![7; len], (to, 4791)).map(drop))
    });
    sent.expect("entered").expect("sent");
}

/// Waits until it has had this number of frames more.
fn takes(asker: &mut Asker, count: u64) {
    let mut sum = 0;
    eventually("its packets", || {
        sum += taken(asker).0;
        sum >= count
    });
    assert_eq!(sum, count);
}

fn begins(host: &Host, asker: &mut Asker, container: usize) {
    let due = format!("at {}", host.container(container).host_end());
    assert_eq!(asker.tell("capture"), due);
}

fn is_refused(asker: &mut Asker, why: &str) {
    let said = asker.tell("capture");
    assert!(said.starts_with("none: ") && said.contains(why), "{said}");
}

#[test]
fn a_container_has_one_capture_of_its_own_packets() {
    let mut host = host_or_skip!("captures::a_container_has_one", 3);
    host.configure("requests_per_second = 1000");
    host.start();
    let descriptors = host.descriptors();
    let (mut one, mut beside, mut other) = (host.asker(0), host.asker(0), host.asker(1));
    begins(&host, &mut one, 0);
    begins(&host, &mut other, 1);
    is_refused(&mut beside, "captures your interface already");
    is_refused(&mut one, "captures your interface already");
    assert!(beside.tell("capture lo").contains("no such interface"));
    send(&host, host.addresses(0)[0], 10, 100);
    takes(&mut one, 10);
    send(&host, host.addresses(1)[0], 20, 100);
    takes(&mut other, 20);
    assert_eq!((taken(&mut one), taken(&mut other)), ((0, 0, true), (0, 0, true)));
    // It hangs up, and is killed: another one begins.
    assert_eq!(one.tell("let-go"), "done");
    eventually("it may begin", || beside.tell("capture eth0").starts_with("at "));
    beside.kill();
    eventually("it may begin", || one.tell("capture").starts_with("at "));
    send(&host, host.addresses(0)[0], 10, 100);
    takes(&mut one, 10);
    // At SIGHUP all end, and then one alone is permitted, and then none.
    reload(&host, "requests_per_second = 1000\ncaptures_max = 1");
    eventually("it ends", || !taken(&mut one).2 && !taken(&mut other).2);
    eventually("it may begin", || one.tell("capture").starts_with("at "));
    is_refused(&mut other, "takes 1 captures already");
    reload(&host, "requests_per_second = 1000\ncaptures_max = 0");
    eventually("it ends", || !taken(&mut one).2);
    is_refused(&mut one, "permits no captures");
    one.tell("let-go");
    eventually("nothing is left", || host.descriptors() <= descriptors);
}

#[test]
fn a_capture_ends_with_its_interface_and_with_the_agent() {
    let mut host = host_or_skip!("captures::a_capture_ends", 2);
    host.start();
    let (mut one, mut other) = (host.asker(0), host.asker(1));
    begins(&host, &mut one, 0);
    begins(&host, &mut other, 1);
    let end = host.container(0).host_end();
    for change in ["set {} down", "set {} up"] {
        host.lab.host().command(&format!("ip link {}", change.replace("{}", end))).expect("done");
        assert!(taken(&mut one).2, "it may come up again");
    }
    host.lab.host().command(&format!("ip link delete {end}")).expect("done");
    eventually("it ends", || !taken(&mut one).2);
    is_refused(&mut one, "no such interface");
    assert!(taken(&mut other).2);
    host.signal(Signal::TERM);
    eventually("it ends", || !taken(&mut other).2);
    is_refused(&mut other, "there is no agent");
}

#[test]
fn a_program_that_does_not_read_loses_frames_and_holds_up_no_other() {
    let mut host = host_or_skip!("captures::a_program_that_does_not_read", 3);
    host.start();
    let (mut idle, mut other) = (host.asker(0), host.asker(1));
    begins(&host, &mut idle, 0);
    begins(&host, &mut other, 1);
    // Some of them say nothing at all.
    let path = rocinante_netdev::handed::capture::path(&host.socket());
    let silent: Vec<_> = (0..50).map_while(|_| connected(&path).ok()).collect();
    // Then their Ethernet addresses are known.
    for (nth, asker) in [&mut idle, &mut other].into_iter().enumerate() {
        send(&host, host.addresses(nth)[0], 1, 100);
        takes(asker, 1);
    }
    // More than the ring and the queue hold.
    send(&host, host.addresses(0)[0], 4000, 1400);
    send(&host, host.addresses(1)[0], 100, 100);
    takes(&mut other, 100);
    host.asker(0).granted(host.addresses(0)[0]);
    let mut sum = 0;
    eventually("all are counted", || {
        let (frames, lost, goes_on) = taken(&mut idle);
        assert!(goes_on);
        sum += frames;
        assert!(sum + lost <= 4000, "{sum} and {lost}");
        lost > 0 && sum + lost == 4000
    });
    assert!(sum > 400, "{sum}");
    drop(silent);
}
