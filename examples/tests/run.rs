//! The examples, run as in the README.

use std::io::{BufRead, BufReader, Read};
use std::net::Ipv4Addr;
use std::process::{Child, Command, Output, Stdio};

/// A process that does not outlive its test.
struct Server {
    child: Child,
    stdout: BufReader<std::process::ChildStdout>,
}

impl Server {
    fn start(program: &str, args: &[&str], ready: &str) -> Self {
        let mut command = Command::new(program);
        let mut child = command.args(args).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut server = Self { child, stdout };
        server.says(ready);
        server
    }

    fn says(&mut self, what: &str) -> String {
        let mut line = String::new();
        while !line.contains(what) {
            line.clear();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "never printed {what:?}");
        }
        line
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Two loopback addresses for the test with this number.
fn addresses(number: u8) -> [String; 2] {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    [0, 1].map(|side| Ipv4Addr::new(127, high | 128, low, 2 * number + side + 1).to_string())
}

fn run(program: &str, args: &[&str]) -> Output {
    Command::new(program).args(args).output().unwrap()
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{out}{err}")
}

#[test]
fn rc_pingpong_plays() {
    let program = env!("CARGO_BIN_EXE_rc_pingpong");
    let [server, client] = addresses(1);
    for size in ["1", "5000"] {
        let options = ["--iters", "200", "--size", size];
        let mut args = vec!["--bind", &server];
        args.extend(options);
        let mut serving = Server::start(program, &args, "waiting on port");
        let mut args = vec!["--bind", &client, &server];
        args.extend(options);
        let output = run(program, &args);
        assert!(output.status.success(), "{}", text(&output));
        assert!(text(&output).contains("all verified"), "{}", text(&output));
        serving.says("all verified");
        assert!(serving.child.wait().unwrap().success());
        let mut rest = String::new();
        serving.stdout.read_to_string(&mut rest).unwrap();
        // On a busy machine it says so.
        assert!(rest.is_empty() || rest.starts_with("of this, other programs"), "{rest}");
    }
}

/// Each side uses a single thread, with many connections at a time.
#[test]
fn async_echo_serves_many_connections() {
    let program = env!("CARGO_BIN_EXE_async_echo");
    let [server, client] = addresses(3);
    let args = ["--bind", &server, "--connections", "65"];
    let mut serving = Server::start(program, &args, "listening on");
    for (connections, size) in [("64", "5000"), ("1", "65536")] {
        let options = ["--connections", connections, "--iters", "30", "--size", size];
        let mut args = vec!["--bind", &client, &server];
        args.extend(options);
        let output = run(program, &args);
        assert!(output.status.success(), "{}", text(&output));
        assert!(text(&output).contains("all verified"), "{}", text(&output));
    }
    let said = serving.says("served 65 connections");
    let most: u32 = said.split(' ').nth(3).unwrap().parse().unwrap();
    assert!((8..=64).contains(&most), "{said}");
    assert!(serving.child.wait().unwrap().success());
}

#[test]
fn kv_store_keeps_what_it_is_given() {
    let program = env!("CARGO_BIN_EXE_kv_store");
    let [server, client] = addresses(2);
    let _serving = Server::start(program, &["serve", "--bind", &server], "slots of");
    let call = |words: &[&str]| {
        let mut args = vec![words[0], "--bind", &client, &server];
        args.extend(&words[1..]);
        let output = run(program, &args);
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    };
    assert_eq!(call(&["get", "colour"]), "there is no \"colour\"\n");
    assert_eq!(call(&["put", "colour", "red"]), "");
    assert_eq!(call(&["get", "colour"]), "red\n");
    assert_eq!(call(&["put", "colour", "blue"]), "");
    assert_eq!(call(&["get", "colour"]), "blue\n");
    for puts in ["300", "20"] {
        let demo = call(&["demo", "--iters", puts]);
        assert!(demo.contains(&format!("{puts} puts and")), "{demo}");
        assert!(demo.ends_with("all verified\n"), "{demo}");
    }
    // The demo has not damaged other keys.
    assert_eq!(call(&["get", "colour"]), "blue\n");
}

#[test]
fn rpc_answers_many_clients_from_one_queue() {
    let program = env!("CARGO_BIN_EXE_rpc");
    let [server, client] = addresses(4);
    let mut serving = Server::start(program, &["serve", "--bind", &server], "serving on");
    let call = |words: &[&str]| {
        let mut args = vec![words[0], "--bind", &client, &server];
        args.extend(&words[1..]);
        run(program, &args)
    };
    assert_eq!(text(&call(&["call", "which way is up?"])), "WHICH WAY IS UP?\n");
    serving.says("client 1 has gone");
    // More clients than one after the other, and more calls than there are buffers.
    let others = addresses(5);
    let clients = others.each_ref().map(|own| {
        let args = ["bench", "--bind", own, &server, "--iters", "600", "--size", "4096"];
        Command::new(program).args(args).stdout(Stdio::piped()).spawn().unwrap()
    });
    for client in clients {
        let output = client.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        assert!(text(&output).contains("600 calls of 4096 bytes"), "{}", text(&output));
    }
    let long = call(&["call", &"x".repeat(4097)]);
    assert!(!long.status.success() && text(&long).contains("4096 bytes at most"));
    assert_eq!(text(&call(&["call", "still there"])), "STILL THERE\n");
}

#[test]
fn without_sense_they_explain_themselves() {
    for (program, args) in [
        (env!("CARGO_BIN_EXE_rc_pingpong"), &["127.0.0.1"][..]),
        (env!("CARGO_BIN_EXE_rc_pingpong"), &["--bind", "here"]),
        (env!("CARGO_BIN_EXE_kv_store"), &["get", "--bind", "127.0.0.1"]),
        (env!("CARGO_BIN_EXE_kv_store"), &["--colour", "red"]),
        (env!("CARGO_BIN_EXE_async_echo"), &["127.0.0.1"]),
        (env!("CARGO_BIN_EXE_rpc"), &["call", "--bind", "127.0.0.1", "127.0.0.2"]),
    ] {
        let output = run(program, args);
        assert_eq!(output.status.code(), Some(2), "{}", text(&output));
        assert!(text(&output).contains("usage: "), "{}", text(&output));
    }
}
