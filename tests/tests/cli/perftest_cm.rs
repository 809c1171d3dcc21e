//! `perf --compat perftest` with `-R` and `-z`: the connection manager connects.

use super::compat::measures;
use super::{Addresses, both, run};
use rocinante::device::Backend;
use rocinante::verbs::{SendData, SendOp};
use rocinante::{Access, OpenOptions, RecvWr, SendWr, WcStatus, cm};
use rocinante_tests::running::Done;
use std::net::SocketAddr;
use std::time::Duration;

/// A client's messages up to its path MTU.
const AGREED: [&[u8]; 4] =
    [b"6.06\0\0\0\0\0\0\0\0\0\0\0\0", &[0, 0, 16, 0], &[0, 0, 0, 64], b"3\0"];
/// The message of both sides if they have nothing to announce.
const NOTHING: &[u8] = &[0; 56];
/// The `wr_id` of all sends.
const SENT: u64 = 99;
const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn every_test_is_the_same() {
    for options in [
        "write-bw -R -n 100 -s 4000 -q 3",
        "write-bw -R -n 60 -s 100 -b -q 2 -l 5",
        "write-lat -R -n 50 -s 8",
        "send-bw -R -n 200 -s 5000 -q 2",
        "send-bw -R -n 60 -s 300 -b -r 7 -e",
        "send-bw -R -c UD -n 200 -s 500 -q 3",
        "send-bw -R -c UD -n 60 -s 300 -b -q 2 -e",
        "send-lat -R -n 50",
        "send-lat -R -c UD -n 50 -T 8",
        "read-bw -R -n 50 -o 3 -q 2 -b",
        "read-lat -R -n 50 -e",
        "atomic-bw -R -n 100 -q 2",
        "atomic-lat -R -n 20",
        "write-bw -z -n 100 -q 2",
        "send-lat -z -c UD -n 50",
        "send-bw -z -c UC -n 50",
        "write-lat --cm -D 2",
    ] {
        measures(options, 1);
    }
    assert_eq!(measures("send-bw -R -n 5 -a -m 512", 23)["mtu"], 512);
}

#[test]
fn unequal_numbers_of_queue_pairs_are_named() {
    for (there, here, word) in [("-q 3", "-q 2", "same -q"), ("-q 2", "-q 3", "same -q")] {
        let line = "perf write-bw --compat perftest -R -n 20";
        let (server, client) = both(&format!("{line} {there}"), &format!("{line} {here}"));
        server.failed(1, &["connecting queue pairs", word]);
        client.failed(1, &["connecting queue pairs", word]);
    }
    let line = "perf send-bw --compat perftest -R -n 20 -s 100";
    let (server, client) = both(&format!("{line} -c UD"), line);
    server.failed(1, &["connecting queue pairs", "same -q and -c"]);
    client.failed(1, &["connecting queue pairs", "it says \"this side has -c UD\""]);
}

#[test]
fn what_makes_no_sense_says_so() {
    for (options, word) in
        [("--compat perftest -R -c UC", "connect no UC"), ("--compat perftest -T 4", "--tclass")]
    {
        run(&format!("perf send-bw --netdev udp {options}")).failed(2, &[word]);
    }
    let families = run("perf send-bw --compat perftest --netdev udp -R --bind ::1 127.0.0.1");
    families.failed(1, &["one family"]);
    // This server listens to other clients.
    let addresses = Addresses::new();
    let server = addresses.serve("perf write-bw --cm");
    let client = addresses.call("perf write-bw --compat perftest -R");
    client.failed(1, &["it says", "this is a rocinante server"]);
    drop(server);
}

/// A server meets a client of the connection manager, which sends these words, one message each.
/// Then the client stays, or goes once it has received as many messages.
fn meets(words: &[&[u8]], stays: bool) -> Done {
    let addresses = Addresses::new();
    let server = addresses.serve("perf write-bw --compat perftest -R");
    let ctx = OpenOptions::new().netdev(Backend::Udp).open(addresses.client.into()).unwrap();
    let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(64).unwrap());
    let memory = pd.allocate(2048, Access::LOCAL_WRITE).unwrap();
    let qp = pd.qp(&cq, &cq).access(Access::ALL).max_send_wr(16).max_recv_wr(16).build().unwrap();
    for wr_id in 0..16 {
        qp.post_recv(&[RecvWr { wr_id, sges: &[memory.sge(0, 256)] }]).unwrap();
    }
    let place = SocketAddr::from((addresses.server, 18515));
    let connection = cm::connect(qp, place, &cm::Params::default(), PATIENCE).unwrap();
    let complete = || {
        let wc = cq.wait_one(PATIENCE).unwrap();
        // A server that has received enough ends the connection, with receives outstanding.
        let sent = wc.wr_id == SENT;
        assert!(wc.status == WcStatus::Success || !sent, "{wc:?}");
        sent
    };
    let mut heard = 0;
    for word in words {
        memory.write(1024, word);
        let sges = [memory.sge(1024, word.len())];
        let (op, data) = (SendOp::Send { imm: None }, SendData::Sges(&sges));
        let wr = SendWr::new(op, data).wr_id(SENT);
        connection.post_send(&[wr]).unwrap();
        while !complete() {
            heard += 1;
        }
    }
    if stays {
        let done = server.finish();
        connection.wait_disconnected(PATIENCE).unwrap();
        return done;
    }
    while heard < words.len() {
        heard += usize::from(!complete());
    }
    drop(connection);
    server.finish()
}

#[test]
fn clients_that_talk_nonsense_are_named() {
    let http: &[u8] = b"GET / HTTP/1.1\r\n";
    meets(&[http], true).failed(1, &["peer 127.", "telling versions", "GET / HTTP"]);
    meets(&[b"hello"], true).failed(1, &["telling versions", "5 bytes, not a message of 16"]);
    let [version, page, line, mtu] = AGREED;
    meets(&[version], false).failed(1, &["agreeing on memory", "closed the connection"]);
    meets(&[version, page, line, b"9\0"], true).failed(1, &["path MTU", "9"]);
    meets(&[version, page, line, mtu], false)
        .failed(1, &["connecting queue pairs", "closed the connection"]);
    // A client that announces queue pairs and does not connect them.
    meets(&[version, page, line, mtu, NOTHING, NOTHING], true)
        .failed(1, &["connecting queue pairs", "as many queue pairs"]);
    let mut wild = NOTHING.to_vec();
    wild[8] = 1;
    meets(&[version, page, line, mtu, &wild], true)
        .failed(1, &["connecting queue pairs", "0x1000000 is no number of a queue pair"]);
}

/// Such a client is rejected, and the server waits for the next.
#[test]
fn other_kinds_of_clients_are_turned_away() {
    let addresses = Addresses::new();
    let line = "perf write-bw --compat perftest -R -n 20";
    let server = addresses.serve(line);
    let other = addresses.call("perf write-bw --cm");
    other.failed(1, &["rejects", "this is a perftest server (--compat perftest -R)"]);
    addresses.call(line).succeeded();
    let done = server.finish().succeeded();
    assert!(done.err.contains("is no client: it asks for another kind"), "{}", done.err);
}
