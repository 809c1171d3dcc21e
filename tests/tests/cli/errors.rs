//! Each error has its cause and its remedy.

use super::{Addresses, Running, rocinante, run, words};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rocinante_tests::unique;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

#[test]
fn a_taken_address_names_its_process() {
    let addresses = Addresses::new();
    // A program that does not share the port.
    let _holder = UdpSocket::bind((addresses.server, 4791)).unwrap();
    let pid = format!("pid {}", std::process::id());
    let line = format!("pingpong --netdev udp --bind {}", addresses.server);
    let second = run(&format!("{line} --json"));
    let second = second.failed(1, &["UDP/4791 is held by", &pid, "or use another address"]);
    assert!(second.json()["error"]["message"].as_str().unwrap().contains(&pid), "{}", second.out);
}

#[test]
fn a_taken_tcp_port_names_its_process() {
    let address = unique::loopback();
    let listener = TcpListener::bind((address, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let pid = format!("pid {}", std::process::id());
    let server = run(&format!("perf send-lat --netdev udp --bind {address} -p {port}"));
    server.failed(1, &[&format!("cannot listen on TCP {address} port {port}"), &pid, "-p"]);
}

#[test]
fn a_server_that_is_not_there_is_told_from_a_wrong_name() {
    let addresses = Addresses::new();
    let words = ["nobody listens on TCP port 18515 there", "start the server first"];
    addresses.call("pingpong --patience 1").failed(1, &words);
    let client = run("perf read-lat --patience 1 no.such.host.invalid");
    client.failed(1, &["cannot find \"no.such.host.invalid\"", "is the name right"]);
    let foreign = run(&format!("pingpong --netdev udp --bind 192.0.2.250 {}", addresses.server));
    foreign.failed(1, &["192.0.2.250", "ip address"]);
    run(&format!("pingpong --bind ::1 {}", addresses.server)).failed(1, &["IPv4 or IPv6"]);
}

#[test]
fn another_service_on_the_port_is_no_server() {
    let addresses = Addresses::new();
    let listener = TcpListener::bind((addresses.server, 18515)).unwrap();
    let ssh = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").unwrap();
        // Until the client has closed.
        let _ = BufReader::new(stream).lines().count();
    });
    addresses.call("pingpong").failed(1, &["no rocinante server", "SSH-2.0-OpenSSH_9.2", "(-p)"]);
    ssh.join().unwrap();
}

/// So do programs of perftest and of rdma-core.
#[test]
fn a_server_that_closes_without_a_word_may_be_of_another_project() {
    let addresses = Addresses::new();
    let listener = TcpListener::bind((addresses.server, 18515)).unwrap();
    let other = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let _request = BufReader::new(stream).lines().next();
    });
    let client = addresses.call("perf write-bw");
    client.failed(1, &["first words", "closed the connection", "`rocinante run -- PROGRAM`"]);
    other.join().unwrap();
}

/// A peer that answers correctly over TCP, names another address, and sends nothing on UDP/4791.
fn translated_server(address: Ipv4Addr, own: Ipv4Addr) -> std::thread::JoinHandle<Vec<String>> {
    let listener = TcpListener::bind((address, 18515)).unwrap();
    let silence = UdpSocket::bind((address, 4791)).unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut answers = stream.try_clone().unwrap();
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        let _request = lines.next().unwrap();
        answers.write_all(b"accepted\n").unwrap();
        let mut hello: Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
        for endpoint in hello["endpoints"].as_array_mut().unwrap() {
            endpoint["address"] = json!(own);
            endpoint["qpn"] = json!(17);
        }
        answers.write_all(format!("{hello}\n").as_bytes()).unwrap();
        // Echo each meeting point but the last words: this side has reached it, too.
        let mut heard = Vec::new();
        for line in lines {
            heard.push(line.clone());
            if !line.starts_with('!') {
                answers.write_all(format!("{line}\n").as_bytes()).unwrap();
            }
        }
        drop(silence);
        heard
    })
}

#[test]
fn a_silent_peer_means_a_firewall() {
    for command in [
        "pingpong",
        "pingpong -e",
        "perf write-lat",
        "perf send-bw",
        "perf read-bw",
        "perf atomic-lat",
    ] {
        let addresses = Addresses::new();
        let server = translated_server(addresses.server, addresses.server);
        let start = Instant::now();
        let client = addresses.call(command);
        let no_reply =
            format!("no reply on UDP/4791 from {}: check the firewall between", addresses.server);
        client.failed(1, &[&no_reply]);
        assert!(start.elapsed() < Duration::from_secs(30), "{command}");
        // The peer gets the error, too.
        let heard = server.join().unwrap();
        assert!(heard.last().unwrap().contains(": no reply on UDP/4791"), "{heard:?}");
    }
}

#[test]
fn a_translation_of_addresses_is_named() {
    let addresses = Addresses::new();
    let own = unique::loopback();
    let server = translated_server(addresses.server, own);
    let seen = addresses.server;
    let between = format!("says that it is at {own}, but is seen at {seen} over TCP");
    addresses.call("pingpong").failed(1, &[&between, "NAT"]);
    let heard = server.join().unwrap();
    assert!(heard.last().unwrap().contains(&between), "the peer gets it, too: {heard:?}");
}

#[test]
fn a_killed_side_is_missed_by_the_other() {
    for test in ["write-lat", "send-lat", "send-bw", "read-bw", "write-bw"] {
        for server_dies in [true, false] {
            let addresses = Addresses::new();
            let command = format!("perf {test}");
            let server = addresses.serve(&command);
            let line = addresses.client_line(&format!("{command} -D 60 --json"));
            let mut client = Running::start(&mut rocinante(words(&line)));
            client.says(&format!(" {test} "));
            std::thread::sleep(Duration::from_millis(200));
            let start = Instant::now();
            let (mut dead, bereaved) =
                if server_dies { (server, client) } else { (client, server) };
            dead.child.kill();
            let bereaved = bereaved.finish();
            assert_eq!(bereaved.status, 1, "{test}: {}", bereaved.err);
            let why = ["closed the connection", "stopped answering", "reset by peer"];
            assert!(why.iter().any(|why| bereaved.err.contains(why)), "{test}: {}", bereaved.err);
            let waited = start.elapsed();
            assert!(waited < Duration::from_secs(30), "{test}: {waited:?}: {}", bereaved.err);
        }
    }
}

/// The peer stops for good, and this side for a part of the time in which it waits.
#[test]
fn a_side_that_got_no_processor_while_it_waited_says_so() {
    let client = || {
        let addresses = Addresses::new();
        // Something is under way at each moment.
        let server = addresses.serve("perf write-bw");
        let line = addresses.client_line("perf write-bw -D 60 -i 0.1 --json");
        let mut client = Running::start(&mut rocinante(words(&line)));
        client.hears("messages", |line| {
            let messages = line.split_whitespace().nth(1).and_then(|word| word.parse().ok());
            line.ends_with(" s") && messages > Some(0_u64)
        });
        let to = |side: &Running, signal| {
            kill(Pid::from_raw(side.child.id().cast_signed()), signal).unwrap();
        };
        to(&server, Signal::SIGSTOP);
        std::thread::sleep(Duration::from_millis(20));
        to(&client, Signal::SIGSTOP);
        std::thread::sleep(Duration::from_millis(300));
        to(&client, Signal::SIGCONT);
        let client = client.finish();
        to(&server, Signal::SIGCONT);
        client.failed(1, &[])
    };
    let says_so = "ms of that time this side was not driven";
    // On a busy machine it may have waited enough before it is stopped.
    let client = (0..5).map(|_| client()).find(|client| client.err.contains(says_so));
    let client = client.expect("a side that says so").failed(1, &["-u 18"]);
    let words: Vec<&str> = client.err.split(' ').collect();
    let at = words.windows(3).position(|it| it == ["ms", "of", "that"]).unwrap();
    let ms: u64 = words[at - 1].parse().unwrap();
    assert!((150..10_000).contains(&ms), "{}", client.err);
}

#[test]
fn a_peer_that_speaks_nonsense_is_named() {
    for nonsense in [
        "{}",
        "{\"rocinante\":9,\"endpoints\":[],\"regions\":[],\"note\":\"\"}",
        "\u{7}",
        "!\u{1b}[2Jno",
    ] {
        let addresses = Addresses::new();
        let listener = TcpListener::bind((addresses.server, 18515)).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _): (TcpStream, _) = listener.accept().unwrap();
            stream.write_all(format!("accepted\n{nonsense}\n").as_bytes()).unwrap();
            let _ = BufReader::new(stream).lines().count();
        });
        let client = addresses.call("perf write-bw -q 2 -n 5");
        let client = client.failed(1, &[&format!("peer {}:18515", addresses.server)]);
        assert!(
            !client.err.contains('\u{1b}') && !client.err.contains('\u{7}'),
            "{:?}",
            client.err
        );
        server.join().unwrap();
    }
}

#[test]
fn a_closed_standard_output_is_no_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let done = rocinante(words("devices")).stdout(writer).output().unwrap();
    // It names interfaces of the machine that are no devices, and nothing else.
    let notes = rocinante(words("devices")).output().unwrap().stderr;
    assert_eq!(String::from_utf8_lossy(&done.stderr), String::from_utf8_lossy(&notes));
    assert_eq!(done.status.code(), Some(0));
}
