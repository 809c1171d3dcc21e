//! Two rails of a machine in one subnet, in the middle of a run: an address goes, a link, and an
//! interface. Requests on that rail end in an error, and the other rail goes on.

use std::net::IpAddr;
use std::time::Instant;

use rocinante::device::Backend;
use rocinante::verbs::{AsyncEvent, QpState, SendOp};
use rocinante::{Access, ConnectOptions, Mr, Qp, RecvWr, WcStatus};
use rocinante_lab::{Lab, LabConfig};
use rocinante_tests::harness::{Family, PATIENCE, Setup, Side, address, wait_until, wr};
use rocinante_tests::oracles::becomes_idle;
use rocinante_tests::{on_each_backend, rails};

on_each_backend!(
    an_address_is_removed_in_the_middle_of_a_run,
    a_link_goes_down_in_a_run,
    a_carrier_is_lost_in_a_run,
    an_interface_is_removed_in_a_run,
);

/// One side of a connection on a rail, and the memory of the peer.
struct Rail<'a> {
    side: &'a Side,
    qp: Qp,
    _peer: Qp,
    target: Mr,
    posted: u64,
}

impl<'a> Rail<'a> {
    fn connect(side: &'a Side, peer: &Side) -> Self {
        let options = ConnectOptions::default();
        let (own, other) = (side.qp().build().unwrap(), peer.qp().build().unwrap());
        let ends = [own.endpoint(), other.endpoint()];
        let other = peer.run(|| other.connect(&ends[0], &options)).unwrap();
        let qp = side.run(|| own.connect(&ends[1], &options)).unwrap();
        let target = peer.pd.allocate(64, Access::ALL).unwrap();
        Self { side, qp, _peer: other, target, posted: 0 }
    }

    fn post(&mut self) {
        self.posted += 1;
        let (remote, rkey) = (self.target.address(), self.target.rkey());
        let op = SendOp::Write { remote, rkey, imm: None };
        self.qp.post_send(&[wr(self.posted, op, &[])]).unwrap();
    }

    fn write(&mut self, status: WcStatus) {
        self.post();
        self.side.complete(self.posted, status);
    }

    fn works(&mut self) {
        for _ in 0..20 {
            self.write(WcStatus::Success);
        }
    }
}

/// A machine with the rails `eth0` and `eth1`, and a peer.
struct Rails {
    second: String,
    sides: [Side; 2],
    peer: Side,
    lab: Lab,
}

impl Rails {
    fn new(backend: Backend) -> Self {
        let lab = Lab::new(&LabConfig::default()).unwrap();
        let at = lab.container(0);
        let second = rails::add(&lab, 0);
        let setup = Setup::new(backend);
        let own = [address(&lab, 0, Family::V4), IpAddr::from(second)];
        let sides = own.map(|own| Side::open(at.netns(), own, &setup));
        let peer = address(&lab, 1, Family::V4);
        let peer = Side::open(lab.container(1).netns(), peer, &setup);
        rails::wait_for_link(&lab, 0);
        Self { second: second.to_string(), sides, peer, lab }
    }

    fn connect(&self) -> [Rail<'_>; 2] {
        self.sides.each_ref().map(|side| Rail::connect(side, &self.peer))
    }

    /// `ip` where the interface of the line is: in the container, or on the host.
    fn ip(&self, line: &str) {
        let at = self.lab.container(0).netns();
        rails::ip(if line.contains("rail") { self.lab.host() } else { at }, line);
    }

    /// The second rail goes by `line`, and comes back by `back`.
    fn lose(&self, line: &str, back: &[&str]) {
        let mut both = self.connect();
        both.iter_mut().for_each(Rail::works);
        self.ip(line);
        let [first, second] = &mut both;
        // A program of XDP takes frames before the kernel looks at addresses, so the news of one
        // that is gone may come a moment later.
        let end = Instant::now() + PATIENCE;
        let status = loop {
            second.post();
            let wc = second.side.next();
            assert_eq!(wc.wr_id, second.posted);
            if wc.status != WcStatus::Success || Instant::now() > end {
                break wc.status;
            }
        };
        assert_eq!(status, WcStatus::RetryExcErr);
        first.works();
        // Requests to the queue pair that failed are flushed.
        second.write(WcStatus::WrFlushErr);
        back.iter().for_each(|line| self.ip(line));
        rails::wait_for_link(&self.lab, 0);
        first.works();
        Rail::connect(second.side, &self.peer).works();
    }
}

fn an_address_is_removed_in_the_middle_of_a_run(backend: Backend) {
    let rails = Rails::new(backend);
    let place = format!("{}/24 dev eth1", rails.second);
    rails.lose(&format!("address del {place}"), &[&format!("address add {place}")]);
}

fn a_link_goes_down_in_a_run(backend: Backend) {
    Rails::new(backend).lose("link set eth1 down", &["link set eth1 up"]);
}

/// The host's end is down: the container's stays up, without a carrier.
fn a_carrier_is_lost_in_a_run(backend: Backend) {
    let rail = rails::host_end(0);
    let [down, up] = ["down", "up"].map(|state| format!("link set {rail} {state}"));
    Rails::new(backend).lose(&down, &[&up]);
}

/// The device of the interface says once that it is gone, and its queue pair is in the error state,
/// although its program sends nothing.
fn an_interface_is_removed_in_a_run(backend: Backend) {
    let rails = Rails::new(backend);
    let mut both = rails.connect();
    both.iter_mut().for_each(Rail::works);
    let [first, second] = &mut both;
    second.qp.post_recv(&[RecvWr { wr_id: 99, sges: &[] }]).unwrap();
    rails.ip("link delete eth1");
    second.side.complete(99, WcStatus::WrFlushErr);
    assert_eq!(second.qp.state(), QpState::Err);
    first.works();
    let mut events = Vec::new();
    wait_until("the loss of the interface", || {
        events.extend(second.side.ctx.poll_async_event());
        events.last() == Some(&AsyncEvent::DeviceFatal)
    });
    first.works();
    assert_eq!(first.qp.state(), QpState::Rts);
    events.extend(second.side.ctx.poll_async_event());
    assert_eq!(events.iter().filter(|event| **event == AsyncEvent::DeviceFatal).count(), 1);
    assert_eq!(first.side.ctx.poll_async_event(), None, "the other device");
    becomes_idle(&[&first.side.ctx, &second.side.ctx]).unwrap();
    first.works();
}
