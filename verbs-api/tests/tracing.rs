//! The events of the feature `tracing`: devices, states, failures, connections and counters.

mod sim;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use rocinante::WcStatus;
use rocinante::cm::{Connecting, Listener, Params};
use rocinante::verbs::Key;
use rocinante_netdev::sim::{SimNet, Verdict};
use sim::{ADDRESSES, connect, send, sides, until, write};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Keeps all events as lines.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    fn has(&self, words: &[&str]) -> bool {
        let lines = self.0.lock().unwrap();
        lines.iter().any(|line| words.iter().all(|word| line.contains(word)))
    }

    fn count(&self, word: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|line| line.contains(word)).count()
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}

impl Subscriber for Lines {
    fn enabled(&self, of: &Metadata<'_>) -> bool {
        of.target().starts_with("rocinante::")
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().target().to_owned());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// One test: the subscriber is the process's, as the devices' threads tell things, too.
#[test]
fn what_happens_is_told_and_no_packet_is() {
    let lines = Lines::default();
    tracing::subscriber::set_global_default(lines.clone()).unwrap();
    let net = SimNet::new();
    let sides = sides(&net, [true, true]);
    let [a, b] = &sides;
    assert!(lines.has(&["rocinante::device", "device=\"sim\"", "opened", "a test wants it"]));
    let [qp, _peer] = connect(&sides, 18);
    let qpn = format!("qpn={}", qp.qpn());
    for state in ["INIT", "RTR", "RTS"] {
        assert!(lines.has(&["rocinante::qp", &qpn, &format!("state={state}")]), "{state}");
    }
    // Traffic that goes well.
    let before = lines.0.lock().unwrap().len();
    for wr_id in 0..2000 {
        qp.post_send(&[write(wr_id, (b.mr.address(), b.mr.rkey()))]).unwrap();
        a.succeed(wr_id);
    }
    let told = lines.0.lock().unwrap()[before..].to_vec();
    // A machine that is busy may have made a packet late.
    assert!(told.len() < 100, "{told:?}");
    // Losses.
    let [lossy, _its] = connect(&sides, 16);
    let mut count = 0;
    net.set_tap(Some(Box::new(move |_| {
        count += 1;
        if count % 5 == 0 { Verdict::Drop } else { Verdict::Pass }
    })));
    for wr_id in 0..50 {
        lossy.post_send(&[write(wr_id, (b.mr.address(), b.mr.rkey()))]).unwrap();
        a.succeed(wr_id);
    }
    net.set_tap(None);
    until("losses are reported", || {
        lines.has(&["rocinante::counters", "device=\"sim\"", "tail_probes", "by=", "total="])
    });
    // A failure: once, though more is flushed.
    let foreign = (b.mr.address(), Key(b.mr.rkey().0 ^ 0x100));
    qp.post_send(&[write(77, foreign), send(78, b"x"), send(79, b"x")]).unwrap();
    assert_eq!(a.cq.wait_one(sim::PATIENCE).unwrap().status, WcStatus::RemAccessErr);
    assert!(lines.has(&["rocinante::qp", &qpn, "status=REM_ACCESS_ERR", "wr_id=77"]));
    assert_eq!((lines.count("wr_id=77"), lines.count("wr_id=78")), (1, 0));
    until("the peer's side is reported", || {
        lines.has(&["rocinante::counters", "remote_access_errors"])
    });
    // Connections.
    let address = SocketAddr::new(ADDRESSES[1], 7471);
    let ask = |private: &[u8]| {
        let qp = a.pd.qp(&a.cq, &a.cq).build().unwrap();
        Connecting::start(qp, address, &Params::default().private_data(private)).unwrap()
    };
    assert!(ask(b"").wait(sim::PATIENCE).is_err());
    assert!(lines.has(&["rocinante::cm", "rejected", "reason="]));
    let listener = Listener::bind(&b.ctx, address, 4).unwrap();
    let asked = ask(b"secret");
    let request = listener.request(Some(sim::PATIENCE)).unwrap();
    assert!(lines.has(&["rocinante::cm", "a peer requests a connection", "peer=10.0.0.1"]));
    let qp = b.pd.qp(&b.cq, &b.cq).build().unwrap();
    let accepted = request.accept(qp, &Params::default()).unwrap();
    let asked = asked.wait(sim::PATIENCE).unwrap();
    let accepted = accepted.wait(sim::PATIENCE).unwrap();
    asked.disconnect().unwrap();
    accepted.wait_disconnected(sim::PATIENCE).unwrap();
    assert!(lines.has(&["rocinante::cm", "established"]));
    assert!(lines.has(&["rocinante::cm", "disconnected", "ByPeer"]));
    assert_eq!(lines.count("secret"), 0);
}
