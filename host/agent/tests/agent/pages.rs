//! Pages of counters, and the metrics that are made of them.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rocinante_netdev::handed::page::{self, Account, COUNTERS, Head, OBJECTS, Page, QueuePair};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::Signal;
use serde_json::Value;

use crate::asker::{Asker, SOON, connected, eventually};
use crate::lab::{Host, host_or_skip};

/// A device of a program, with its page, its connection, and what it charges.
struct Device {
    _connection: OwnedFd,
    page: Page,
    head: Head,
    account: Account,
}

/// The devices of a program.
#[derive(Default)]
pub(crate) struct Devices(Vec<Device>);

impl Devices {
    /// Opens one that has this key and this name. A program of `before` knows no limits.
    pub(crate) fn open(&mut self, agent: &Path, key: &str, name: &str, before: bool) -> String {
        let account = Account::default();
        let got = || -> io::Result<(OwnedFd, Page)> {
            let connection = connected(&page::path(agent))?;
            match before {
                true => {
                    let ask = format!("{{\"version\":1,\"key\":{key}}}");
                    send(&connection, ask.as_bytes(), SendFlags::empty())?;
                }
                false => page::ask(&connection, key.parse().expect("a number"))?,
            }
            let end = Instant::now() + SOON;
            loop {
                match page::receive(&connection) {
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    received => {
                        let (page, seat) = received?;
                        assert_eq!(seat.is_none(), before);
                        seat.into_iter().for_each(|seat| account.sit(seat));
                        return Ok((connection, page));
                    }
                }
            }
        };
        match got() {
            Ok((_connection, page)) => {
                let (device, backend) = (name.to_owned(), "udp".to_owned());
                let head = Head { device, backend, why: "no agent".into(), shards: 1 };
                self.0.push(Device { _connection, page, head, account });
                format!("device {}", self.0.len())
            }
            Err(error) => format!("none: {error}"),
        }
    }

    /// Charges the last one, or gives back, what stands in `amounts`: three numbers.
    pub(crate) fn charge(&self, amounts: &[&str], back: bool) -> String {
        let amounts = [0, 1, 2].map(|nth| amounts[nth].parse().expect("a number"));
        let account = &self.0.last().expect("a device").account;
        if back {
            account.refund(&amounts);
            return "done".into();
        }
        match account.charge(&amounts) {
            Ok(()) => "done".into(),
            Err(page::Exceeded { resource, limit }) => {
                format!("{}={limit}", page::RESOURCES[resource])
            }
        }
    }

    /// Each counter of each device is this.
    pub(crate) fn count(&self, count: &str) -> String {
        let count: u64 = count.parse().expect("a number");
        for Device { page, head, .. } in &self.0 {
            page.publish(head, 0, |section| {
                section.objects([2; OBJECTS.len()]);
                section.counters([count; COUNTERS.len()]);
                for row in [0, 1] {
                    let qp = QueuePair {
                        numbers: [17 + row, 18],
                        state: 3,
                        service: 0,
                        peer: Some([10, 77, 0, 2].into()),
                        sent: [count, 2],
                        received: [3, 4],
                        repeated: 5,
                        not_ready: 6,
                        requests: [7, 8],
                        held: [9, 10],
                    };
                    section.row(row as usize, Some(&qp));
                }
                section.rows_end(2);
            });
        }
        "done".into()
    }

    pub(crate) fn close(&mut self) -> String {
        self.0.clear();
        "done".into()
    }
}

/// The answer of the agent's HTTP to a request: the status and the text.
fn asked(host: &Host, request: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(host.dir().join("metrics.sock")).expect("it listens");
    stream.set_read_timeout(Some(SOON)).expect("set");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut all = String::new();
    stream.read_to_string(&mut all).expect("an answer");
    let (head, text) = all.split_once("\r\n\r\n").unwrap_or((&all, ""));
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    (status.unwrap_or(0), text.to_owned())
}

pub(crate) fn got(host: &Host, path: &str) -> String {
    let (status, text) = asked(host, &format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n"));
    assert_eq!(status, 200, "{path}: {text}");
    text
}

fn json(host: &Host, path: &str) -> Value {
    serde_json::from_str(&got(host, path)).expect("JSON")
}

/// The value of a series in a scrape.
pub(crate) fn value(text: &str, series: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.rsplit_once(' ').is_some_and(|it| it.0 == series))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// The packets that a container's devices have sent, by a scrape.
fn sent(host: &Host, container: usize, device: &str) -> Option<u64> {
    let name = host.container(container).host_end();
    let series = format!("rocinante_sent_pkts_total{{container=\"{name}\",device=\"{device}\"}}");
    value(&got(host, "/metrics"), &series)
}

pub(crate) fn serving(host: &mut Host) {
    let line = format!("metrics = {:?}", host.dir().join("metrics.sock"));
    host.configure(&line);
    begins(host);
}

/// An agent begins, or another one after the first.
pub(crate) fn begins(host: &mut Host) {
    host.start();
    eventually("it serves metrics", || {
        UnixStream::connect(host.dir().join("metrics.sock")).is_ok()
    });
}

pub(crate) fn answers(asker: &mut Asker, command: &str, answer: &str) {
    assert_eq!(asker.tell(command), answer, "{command}");
}

#[test]
fn what_programs_count_is_scraped_and_stays() {
    let mut host = host_or_skip!("what_programs_count_is_scraped_and_stays", 2);
    serving(&mut host);
    let [mut one, mut other] = [0, 1].map(|container| host.asker(container));
    let address = host.addresses(1)[0];
    other.granted(address);
    let refused = other.tell("ask 10.99.99.99");
    assert!(refused.starts_with("refused "), "{refused}");
    answers(&mut one, "device 7 eth0", "device 1");
    answers(&mut one, "device 8 eth0", "device 2");
    answers(&mut other, "device 7 eth0", "device 1");
    assert_eq!([sent(&host, 0, "eth0"), sent(&host, 1, "eth0")], [None; 2]);
    answers(&mut one, "count 10", "done");
    answers(&mut other, "count 40", "done");
    assert_eq!([sent(&host, 0, "eth0"), sent(&host, 1, "eth0")], [Some(20), Some(40)]);

    let text = got(&host, "/metrics");
    let ends = [0, 1].map(|container| host.container(container).host_end().to_owned());
    for (series, expected) in [
        (format!("rocinante_objects{{container={:?},device=\"eth0\",kind=\"qp\"}}", ends[0]), 4),
        (format!("rocinante_fallen_back_devices{{container={:?}}}", ends[0]), 0),
        (format!("rocinante_fallen_back_devices{{container={:?}}}", ends[1]), 1),
        (format!("rocinante_ports{{container={:?},backend=\"packet\"}}", ends[1]), 1),
        ("rocinante_agent_requests_total{outcome=\"granted\"}".into(), 1),
        ("rocinante_agent_request_wait_seconds_count".into(), 1),
    ] {
        assert_eq!(value(&text, &series), Some(expected), "{series}\n{text}");
    }
    let used = value(&text, "rocinante_agent_ring_bytes{kind=\"used\"}");
    assert!(used.is_some_and(|bytes| bytes > 1 << 20), "{used:?}");
    let bytes = format!("rocinante_host_end_received_bytes_total{{container={:?}}}", ends[0]);
    assert!(value(&text, &bytes).is_some(), "{text}");

    let all = json(&host, "/v1/containers");
    assert_eq!(all.as_array().map(Vec::len), Some(2), "{all}");
    let one_now = json(&host, &format!("/v1/containers/{}", ends[0]));
    let device = &one_now["devices"][0];
    assert_eq!(device["counters"]["rcvd_pkts"], 20, "{one_now}");
    assert_eq!(device["open"].as_array().map(Vec::len), Some(2));
    assert_eq!(device["queue_pairs"].as_array().map(Vec::len), Some(4));
    assert_eq!(device["queue_pairs"][1]["number"], 18);
    assert_eq!(device["queue_pairs"][0]["peer"], "10.77.0.2");
    assert_eq!(device["queue_pairs"][0]["state"], "RTS");
    assert_eq!(json(&host, "/v1/node")["agent"]["ports"], 1);
    assert_eq!(got(&host, "/healthz"), "ok\n");

    // A device is closed, a program is killed; the agent is killed, and begins anew.
    answers(&mut one, "count 11", "done");
    answers(&mut one, "close-devices", "done");
    drop(other);
    eventually("the devices have gone", || {
        let text = got(&host, "/metrics");
        !text.contains("rocinante_open_devices{")
    });
    assert_eq!([sent(&host, 0, "eth0"), sent(&host, 1, "eth0")], [Some(22), Some(40)]);
    host.kill();
    begins(&mut host);
    assert_eq!([sent(&host, 0, "eth0"), sent(&host, 1, "eth0")], [Some(22), Some(40)]);
    // One that was open counts on where it was.
    answers(&mut one, "device 9 eth0", "device 1");
    answers(&mut one, "count 5", "done");
    assert_eq!(sent(&host, 0, "eth0"), Some(27));
    host.kill();
    begins(&mut host);
    assert_eq!(sent(&host, 0, "eth0"), Some(27));
    answers(&mut one, "close-devices", "done");
    answers(&mut one, "device 9 eth0", "device 1");
    answers(&mut one, "count 6", "done");
    assert_eq!(sent(&host, 0, "eth0"), Some(28));
    // An agent that ends has looked at last.
    answers(&mut one, "count 7", "done");
    host.terminate();
    begins(&mut host);
    assert_eq!(sent(&host, 0, "eth0"), Some(29));
    host.terminate();
    let (is_good, said) = host.operator(&["release", "--all", "--force"]);
    assert!(is_good, "{said}");
    for file in [host.state().with_file_name("counters.json"), page::path(&host.socket())] {
        assert!(!file.exists(), "{}", file.display());
    }
}

#[test]
fn a_container_that_opens_devices_without_end_leaves_others_theirs() {
    let mut host =
        host_or_skip!("a_container_that_opens_devices_without_end_leaves_others_theirs", 2);
    host.configure("requests_per_second = 1000");
    serving(&mut host);
    let [mut hostile, mut other] = [0, 1].map(|container| host.asker(container));
    let before = host.descriptors();
    let mut open = 0;
    for key in 0..300 {
        let answer = hostile.tell(&format!("device {key} eth{key}"));
        open += usize::from(answer.starts_with("device "));
    }
    assert_eq!(open, 256, "as many as it may have");
    answers(&mut hostile, "count 1", "done");
    answers(&mut other, "device 1 eth0", "device 1");
    answers(&mut other, "count 3", "done");
    assert_eq!(sent(&host, 1, "eth0"), Some(3));
    let text = got(&host, "/metrics");
    let series = text.lines().filter(|line| line.starts_with("rocinante_sent_pkts_total{"));
    assert!(series.count() <= 16 + 1 + 1, "{text}");
    // Nonsense, and connections that say nothing.
    answers(&mut hostile, "hold-pages 50", "done");
    assert_eq!(sent(&host, 1, "eth0"), Some(3));
    answers(&mut hostile, "close-devices", "done");
    answers(&mut hostile, "close", "done");
    answers(&mut other, "close-devices", "done");
    host.signal(Signal::STOP);
    answers(&mut hostile, "leave-pages 50", "done");
    host.signal(Signal::CONT);
    eventually("all descriptors are given back", || host.descriptors() <= before);
}

#[test]
fn a_bad_request_for_metrics_gets_an_answer_or_none() {
    let mut host = host_or_skip!("a_bad_request_for_metrics_gets_an_answer_or_none", 1);
    serving(&mut host);
    let long = "a".repeat(20_000);
    for (request, expected) in [
        ("POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc".to_owned(), 405),
        ("GET / HTTP/1.1\r\nHost: a\r\n\r\n".into(), 404),
        ("GET /v1/containers/none HTTP/1.1\r\nHost: a\r\n\r\n".into(), 404),
        ("GET /v1/containers/../../etc HTTP/1.1\r\nHost: a\r\n\r\n".into(), 404),
        ("\0\u{1}\u{2}\r\n\r\n".into(), 400),
        ("GET /metrics HTTP/9.9\r\n\r\n".into(), 400),
        (format!("GET /{long} HTTP/1.1\r\nHost: a\r\n\r\n"), 431),
    ] {
        let mut stream = UnixStream::connect(host.dir().join("metrics.sock")).expect("it listens");
        stream.set_read_timeout(Some(SOON)).expect("set");
        // It may hang up before all is sent.
        let _ = stream.write_all(request.as_bytes());
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all);
        let said = String::from_utf8_lossy(&all).into_owned();
        let status = said.split(' ').nth(1).unwrap_or("none");
        let is_answer = status == expected.to_string() || (said.is_empty() && expected >= 414);
        assert!(
            is_answer,
            "{}: {said}",
            request.escape_debug().to_string().get(..40).unwrap_or("")
        );
    }
    // Those that say nothing go, and others come in their place.
    let connect = || UnixStream::connect(host.dir().join("metrics.sock")).expect("it listens");
    let (before, mut most) = (host.descriptors(), 0);
    let silent: Vec<UnixStream> = (0..40).map(|_| connect()).collect();
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let is_over = |it: &&UnixStream| recv(it, &mut [0_u8; 1][..], flags).is_ok_and(|it| it.0 == 0);
    eventually("there are places for sixteen", || {
        most = most.max(host.descriptors());
        silent.iter().filter(is_over).count() >= 24
    });
    assert!(most <= before + 16 + 1, "{most}, {before} before");
    eventually("there is room again", || {
        let mut stream = connect();
        stream.set_read_timeout(Some(SOON)).expect("set");
        let mut all = String::new();
        let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n");
        let _ = stream.read_to_string(&mut all);
        all.contains(" 200 ")
    });
    drop(silent);
    let accept = "GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: application/openmetrics-text\r\n\r\n";
    let (status, text) = asked(&host, accept);
    assert!(status == 200 && text.ends_with("# EOF\n"), "{text}");
    assert!(!got(&host, "/metrics").contains("# EOF"), "promtool reads no OpenMetrics");
    // Another process has the place: ports are more important.
    let taken = host.dir().join("metrics.sock");
    host.terminate();
    fs::remove_file(&taken).expect("removed");
    fs::create_dir(&taken).expect("made");
    host.start();
    host.logged(&["no metrics are served at", "metrics.sock"]);
    let address = host.addresses(0)[0];
    host.asker(0).granted(address);
}
