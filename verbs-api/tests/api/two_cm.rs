//! Two listeners, and two connections between two devices: an action on one does not affect the
//! other.

use crate::sim::{ADDRESSES, Side, done, is_ready, undriven, until, write};
use rocinante::WcStatus;
use rocinante::cm::{Connecting, Connection, Listener, Params};

/// Only the listener of the requested port gets a's request.
#[test]
fn each_of_two_listeners_hears_its_own_and_a_port_is_free_when_its_listener_goes() {
    let sides = undriven();
    let [a, b] = &sides;
    let bind = |port: u16| Listener::bind(&b.ctx, (ADDRESSES[1], port).into(), 4).unwrap();
    let [first, second] = [7471, 7472].map(bind);
    let ask = |port: u16| {
        let qp = a.qp();
        let asked = Connecting::start(qp, (ADDRESSES[1], port).into(), &Params::default()).unwrap();
        b.ctx.progress();
        asked
    };
    let to_second = ask(7472);
    assert_eq!([is_ready(&first), is_ready(&second)], [false, true]);
    assert!(first.try_request().unwrap().is_none());
    let to_first = ask(7471);
    assert_eq!([is_ready(&first), is_ready(&second)], [true, true]);
    // A dropped request vanishes from its listener, and leaves the other's.
    drop(to_first);
    b.ctx.progress();
    assert_eq!([is_ready(&first), is_ready(&second)], [false, true]);
    assert!(first.try_request().unwrap().is_none());
    drop(first);
    let mut refused = ask(7471);
    a.ctx.progress();
    assert!(refused.try_finish().is_err(), "there is no listener");
    let third = bind(7471);
    let _asked = ask(7471);
    assert_eq!([is_ready(&third), is_ready(&second)], [true, true]);
    assert!(second.try_request().unwrap().is_some() && third.try_request().unwrap().is_some());
    assert_eq!([is_ready(&third), is_ready(&second)], [false, false]);
    drop(to_second);
}

fn connected(sides: &[Side; 2], listener: &Listener) -> [Connection; 2] {
    let [a, b] = sides;
    let qp = |side: &Side| side.qp();
    let mut asked = Connecting::start(qp(a), listener.address(), &Params::default()).unwrap();
    b.ctx.progress();
    let request = listener.try_request().unwrap().expect("it has come");
    let mut accepted = request.accept(qp(b), &Params::default()).unwrap();
    a.ctx.progress();
    let asked = asked.try_finish().unwrap().expect("accepted");
    b.ctx.progress();
    [asked, accepted.try_finish().unwrap().expect("established")]
}

#[test]
fn the_end_of_one_of_two_connections_is_no_news_of_the_other() {
    let sides = undriven();
    let [a, b] = &sides;
    let listener = Listener::bind(&b.ctx, (ADDRESSES[1], 7471).into(), 4).unwrap();
    let before = [a, b].map(|side| side.ctx.resources().unwrap());
    let [first, first_there] = connected(&sides, &listener);
    let [second, second_there] = connected(&sides, &listener);
    let bells = [&first_there, &second_there].map(|it| it.notifier().unwrap());
    first.disconnect().unwrap();
    b.ctx.progress();
    assert_eq!(bells.each_ref().map(is_ready), [true, false]);
    for _ in 0..2 {
        assert!(first_there.is_disconnected() && !second_there.is_disconnected());
    }
    assert!(is_ready(&bells[0]), "it stays so");
    let at = (b.mr.address(), b.mr.rkey());
    assert_eq!(done(&sides, &second, write(1, at)), WcStatus::Success);
    // The first one's queue pair is flushed, the second one's is not.
    drop((first, first_there));
    assert_eq!(done(&sides, &second, write(1, at)), WcStatus::Success);
    drop((second, second_there));
    b.ctx.progress();
    let after = [a, b].map(|side| side.ctx.resources().unwrap());
    for (before, after) in before.into_iter().zip(after) {
        assert_eq!((after.qps, after.paths, after.mrs), (before.qps, before.paths, before.mrs));
    }
    // They are over once their packets in flight cannot arrive any more.
    until("numbers are given back", || {
        [a, b].iter().all(|side| {
            side.ctx.progress();
            let resources = side.ctx.resources().unwrap();
            (resources.connections, resources.kept_qpns) == (0, 0)
        })
    });
}
