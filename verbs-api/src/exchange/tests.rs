//! Lines of an exchange, valid and not.

use super::*;
use std::io::{Read, Write};

use rocinante_stack::types::{Psn, Qpn};

fn connected() -> (Exchange, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut exchange = Exchange::accept_from(&listener).unwrap();
    exchange.set_patience(Some(Duration::from_millis(300)));
    exchange.enter("first words");
    (exchange, other)
}

/// The longest that a test waits for a thread or the system.
const PATIENCE: Duration = Duration::from_secs(30);

/// The result of reading from a peer that sends this and then stays silent; it must come in time.
fn heard(words: &[u8]) -> Result<String, String> {
    let (mut exchange, mut other) = connected();
    if words.contains(&b'\n') || words.len() > LINE_MAX {
        // The writer needs a processor.
        exchange.set_patience(Some(PATIENCE));
    }
    // What a read takes at once is there before the read.
    let (first, rest) = words.split_at(words.len().min(4096));
    other.write_all(first).unwrap();
    let rest = rest.to_vec();
    let writer = std::thread::spawn(move || {
        let _ = other.write_all(&rest);
        other
    });
    let start = Instant::now();
    let heard = exchange.hear().map_err(|error| error.to_string());
    assert!(start.elapsed() < PATIENCE);
    drop(exchange);
    drop(writer.join().unwrap());
    heard
}

#[test]
fn lines_are_heard_one_by_one() {
    let (mut exchange, mut other) = connected();
    other.write_all("one\n\nthr\u{e9}\nfo".as_bytes()).unwrap();
    assert_eq!(exchange.hear().unwrap(), "one");
    assert_eq!(exchange.try_hear().unwrap().as_deref(), Some(""));
    assert_eq!(exchange.hear().unwrap(), "thr\u{e9}");
    other.write_all(b"ur\n").unwrap();
    assert_eq!(exchange.hear().unwrap(), "four");
    assert_eq!(exchange.try_hear().unwrap(), None);
    let Link::Tcp(stream) = &exchange.link else { panic!() };
    let flags = rustix::fs::fcntl_getfl(stream.get_ref()).unwrap();
    assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK), "later calls wait");
    drop(other);
    // The end of a connection takes its way through the system.
    let start = Instant::now();
    let why = loop {
        match exchange.try_hear() {
            Ok(None) => assert!(start.elapsed() < PATIENCE),
            Ok(line) => panic!("{line:?}"),
            Err(error) => break error.to_string(),
        }
    };
    assert!(why.contains("it closed the connection"), "{why}");
}

#[test]
fn peers_that_say_no_line_are_named_with_the_phase() {
    for (words, word) in [
        (&b""[..], "nothing within"),
        (b"half a line", "11 bytes of a line within"),
        (b"\xff\xfe\n", "no text"),
        (b"!I\x1bcannot\n", "gave up: I?cannot"),
        (&vec![b'x'; LINE_MAX + 100_000], "longer than"),
    ] {
        let why = heard(words).unwrap_err();
        assert!(why.contains("peer 127.0.0.1:") && why.contains("first words: "), "{why}");
        assert!(why.contains(word), "no {word:?} in: {why}");
    }
}

/// A byte now and then does not extend the wait.
#[test]
fn whoever_drips_is_no_better() {
    let (mut exchange, mut other) = connected();
    other.write_all(b"x").unwrap();
    let dripping = std::thread::spawn(move || {
        while other.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(30));
        }
    });
    let start = Instant::now();
    let why = exchange.barrier("ready").unwrap_err().to_string();
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    assert!(why.contains("meeting at \"ready\": it said"), "{why}");
    drop(exchange);
    dripping.join().unwrap();
}

#[test]
fn whoever_is_busy_is_waited_for_as_long_as_that_can_be_seen() {
    let (mut exchange, mut other) = connected();
    let mut asked = 0;
    let silent = exchange.barrier_while("done", || {
        asked += 1;
        asked < 4
    });
    assert!(silent.unwrap_err().to_string().contains("nothing within"));
    let busy = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(700));
        other.write_all(b"done\n").unwrap();
        other
    });
    exchange.barrier_while("done", || true).unwrap();
    drop(busy.join().unwrap());
    let gone = exchange.barrier_while("done", || true).unwrap_err().to_string();
    assert!(gone.contains("closed the connection"), "{gone}");
}

#[test]
fn whoever_does_not_read_is_named() {
    let (mut exchange, other) = connected();
    let Link::Tcp(stream) = &exchange.link else { panic!() };
    stream.get_ref().set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    let why = exchange.say(&"x".repeat(64 << 20)).unwrap_err().to_string();
    assert!(why.contains("does not read"), "{why}");
    drop(other);
}

#[test]
fn a_peer_at_another_point_is_told_apart() {
    let (mut exchange, mut other) = connected();
    other.write_all(b"finished\n").unwrap();
    let why = exchange.barrier("ready").unwrap_err().to_string();
    assert!(why.contains("it is at \"finished\", not at \"ready\""), "{why}");
    drop(exchange);
    let mut said = String::new();
    other.read_to_string(&mut said).unwrap();
    assert_eq!(said, "ready\n");
}

/// Errors after a step that failed name the program's own phase again.
#[test]
fn a_step_that_failed_is_over() {
    type Step = fn(&mut Exchange) -> Result<(), VerbsError>;
    let steps: [Step; 3] = [
        |exchange| exchange.swap(&Hello::default()).map(drop),
        |exchange| exchange.barrier("ready"),
        |exchange| exchange.barrier_while("ready", || true),
    ];
    let (mut exchange, mut other) = connected();
    for step in steps {
        other.write_all(b"elsewhere\n").unwrap();
        let why = step(&mut exchange).unwrap_err().to_string();
        assert!(!why.contains("first words"), "{why}");
        let why = exchange.error("own").to_string();
        assert!(why.ends_with(", first words: own"), "{why}");
    }
}

/// The two sides of an exchange over queue pairs.
fn managed() -> [Exchange; 2] {
    let (here, there) = crate::doc::addresses();
    let server = Context::open(there).unwrap();
    let at = SocketAddr::new(there, 7471);
    let asking = std::thread::spawn(move || {
        let ctx = Context::open(here).unwrap();
        Exchange::connect_cm(&ctx, at, PATIENCE).unwrap()
    });
    // At first no program listens.
    std::thread::sleep(Duration::from_millis(50));
    let listener = cm::Listener::bind(&server, at, 4).unwrap();
    let request = listener.request(Some(PATIENCE)).unwrap();
    let accepted = Exchange::accept_cm(&server, request).unwrap();
    let asked = asking.join().unwrap();
    assert_eq!((asked.peer(), accepted.local().unwrap().ip()), (at, there));
    assert_eq!((accepted.peer().ip(), asked.local().unwrap().ip()), (here, here));
    assert_eq!(asked.path_mtu(), accepted.path_mtu());
    [asked, accepted]
}

/// Whether `watch` soon says that the peer has gone. A line is on its way for a while.
fn notices(watch: &PeerWatch) -> bool {
    let end = Instant::now() + PATIENCE;
    while !watch.is_gone() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    watch.is_gone()
}

#[test]
fn lines_go_over_a_queue_pair_as_over_tcp() {
    let [mut a, mut b] = managed();
    assert_eq!(b.try_hear().unwrap(), None);
    // Longer than all receives together.
    let long = "long ".repeat(50_000);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            a.say("one").unwrap();
            a.say("").unwrap();
            a.say(&long).unwrap();
            a.barrier("met").unwrap();
        });
        assert_eq!((b.hear().unwrap().as_str(), b.hear().unwrap().as_str()), ("one", ""));
        assert_eq!(b.hear().unwrap(), long);
        b.barrier("met").unwrap();
    });
    b.set_patience(Some(Duration::from_millis(300)));
    let why = b.hear().unwrap_err().to_string();
    assert!(why.contains("nothing within"), "{why}");
    let watch = b.watch().unwrap();
    assert!(!watch.is_gone());
    a.give_up("enough");
    assert!(notices(&watch), "the peer gave up");
    assert!(b.hear().unwrap_err().to_string().contains("gave up: enough"));
}

/// Both sides send before they read, and a hello is longer than all receives together.
#[test]
fn two_sides_swap_long_hellos() {
    let both = managed().into_iter().zip([1_u32, 2]);
    let hello = |side: u32| {
        let endpoint = |qpn| Endpoint::new([10, 0, 0, 1].into(), qpn, Psn::new(side), Mtu::Mtu1024);
        let endpoints = (2..2002).map(|qpn| endpoint(Qpn::new(qpn))).collect();
        Hello { endpoints, ..Hello::default() }
    };
    std::thread::scope(|scope| {
        for (mut exchange, side) in both {
            scope.spawn(move || assert_eq!(exchange.swap(&hello(side)).unwrap(), hello(3 - side)));
        }
    });
}

/// A peer that has reached the end of the work gives up or goes: its earlier lines hide neither.
#[test]
fn a_peer_that_goes_is_noticed_behind_its_unread_lines() {
    for managed_too in [false, true] {
        let both = || {
            if managed_too {
                return managed();
            }
            let (exchange, other) = connected();
            let peer = other.peer_addr().unwrap();
            [Exchange::over(other, peer).unwrap(), exchange]
        };
        let goes: [fn(Exchange); 2] = [|mut peer| peer.give_up("enough"), drop];
        for (goes, reason) in goes.into_iter().zip(["gave up: enough", "closed the connection"]) {
            let [mut a, mut b] = both();
            a.say("finished").unwrap();
            let watch = b.watch().unwrap();
            assert!(!watch.is_gone());
            goes(a);
            assert!(notices(&watch), "{reason}");
            assert_eq!(b.hear().unwrap(), "finished");
            let why = b.hear().unwrap_err().to_string();
            assert!(why.contains(reason), "{why}");
        }
    }
}

/// It is gone before its connection is, and whatever it said before.
#[test]
fn a_peer_that_gave_up_is_noticed_while_its_connection_stands() {
    let (exchange, mut other) = connected();
    let watch = exchange.watch().unwrap();
    other.write_all(b"finished\n").unwrap();
    assert!(!watch.is_gone());
    other.write_all(b"!enough\n").unwrap();
    assert!(notices(&watch));
    drop(other);
}

/// The peer has met this side before it goes, though nothing can be sent to it any more.
#[test]
fn a_peer_that_goes_right_after_a_meeting_has_met() {
    for (said, meets) in [("done", true), ("go", false)] {
        let [mut a, mut b] = managed();
        let watch = b.watch().unwrap();
        a.say(said).unwrap();
        drop(a);
        assert!(notices(&watch));
        assert!(b.say("nothing leaves").is_err());
        assert_eq!(b.barrier("done").is_ok(), meets, "{said}");
        let why = b.barrier("done").unwrap_err().to_string();
        assert!(why.contains("it closed the connection"), "{why}");
    }
}

#[test]
fn who_hangs_up_is_heard_to_the_end() {
    let [mut a, mut b] = managed();
    a.say("last words").unwrap();
    drop(a);
    assert_eq!(b.hear().unwrap(), "last words");
    let why = b.hear().unwrap_err().to_string();
    assert!(why.contains("it closed the connection"), "{why}");
    assert!(b.watch().unwrap().is_gone() && b.say("x").is_err());
}

#[test]
fn who_asks_for_another_kind_of_connection_is_told_so() {
    let (here, there) = crate::doc::addresses();
    let (server, client) = (Context::open(there).unwrap(), Context::open(here).unwrap());
    let at = SocketAddr::new(there, 7471);
    let listener = cm::Listener::bind(&server, at, 4).unwrap();
    let asking = std::thread::spawn(move || {
        let (pd, cq) = (client.alloc_pd(), client.create_cq(4).unwrap());
        let qp = pd.qp(&cq, &cq).build().unwrap();
        let patience = PATIENCE;
        let rejected = cm::connect(qp, at, &cm::Params::default(), patience).unwrap_err();
        let unheard = Exchange::connect_cm(&client, at, patience).unwrap_err();
        (rejected, unheard.to_string())
    });
    let stranger = listener.request(Some(PATIENCE)).unwrap();
    assert!(!Exchange::is_asked_for_by(&stranger));
    let why = Exchange::accept_cm(&server, stranger).unwrap_err().to_string();
    assert!(why.contains("another kind"), "{why}");
    let asks = listener.request(Some(PATIENCE)).unwrap();
    assert!(Exchange::is_asked_for_by(&asks));
    asks.reject(b"not now").unwrap();
    let (rejected, unheard) = asking.join().unwrap();
    assert_eq!(rejected.errno(), 111);
    assert!(unheard.contains("cannot connect to") && unheard.contains("not now"), "{unheard}");
}
