//! The commands with two sides, and `devices`, run as users run them.

#[path = "../common/schema.rs"]
mod schema;

mod agreement;
mod bench;
mod black_hole;
mod capture;
mod cm_bench;
mod confined;
mod container;
mod devices;
mod ending;
mod engines;
mod errors;
mod evaluate;
mod examples;
mod faults;
mod guardian;
mod handed;
mod json;
mod known;
mod lab;
mod managed;
mod manual;
mod moved;
mod network_policy;
mod outlived;
mod patience;
mod perf;
mod pingpong;
mod quota;
mod rates;
mod rping;
mod run;
mod shared;
mod stat;
mod surroundings;
mod top;
mod ways;

use std::ffi::OsStr;
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};
use std::time::Duration;

use rocinante_lab::{Container, Lab};
use rocinante_tests::running::{Done, Running};
use rocinante_tests::unique;

fn rocinante<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    command(env!("CARGO_BIN_EXE_rocinante-under-test"), args)
}

/// Starts a command in a container, with its output to be read.
fn start_command(container: &Container, command: &mut Command) -> Running {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    Running::of(container.spawn(command).unwrap())
}

/// Starts a command line on the host of a lab.
fn start_on_host(lab: &Lab, line: &str) -> Running {
    let mut command = rocinante(words(line));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    Running::of(lab.host().spawn(&mut command).unwrap())
}

/// Starts a command line in a container.
fn start(container: &Container, line: &str) -> Running {
    start_command(container, &mut rocinante(words(line)))
}

fn rocinante_bench<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    command(env!("CARGO_BIN_EXE_rocinante-bench-under-test"), args)
}

fn command<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program);
    command.args(args).env_remove("ROCINANTE_NETDEV").stdin(Stdio::null());
    command
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// Runs a command line of `rocinante` to its end. Its JSON must be as documented.
fn run(line: &str) -> Done {
    checked(line, Running::start(&mut rocinante(words(line))).finish())
}

/// The result of the command line. Its JSON must be as documented.
fn checked(line: &str, done: Done) -> Done {
    let given = |option: &str| words(line).iter().any(|word| word == option);
    if given("--json") && !given("--help") {
        done.out.lines().for_each(|line| schema::check(&serde_json::from_str(line).unwrap()));
    }
    done
}

/// Runs a command line of `rocinante-bench` to its end. Many measurements take their time on a busy
/// machine.
fn run_bench(line: &str) -> Done {
    let bench = Running::start(&mut rocinante_bench(words(line)));
    checked(line, bench.finish_within(Duration::from_secs(300)))
}

/// Two addresses on loopback that no other program uses.
struct Addresses {
    server: Ipv4Addr,
    client: Ipv4Addr,
}

impl Addresses {
    fn new() -> Self {
        Self { server: unique::loopback(), client: unique::loopback() }
    }

    /// Starts the server of a command and waits until it is ready.
    #[track_caller]
    fn serve(&self, command: &str) -> Running {
        let line = format!("{command} --netdev udp --bind {}", self.server);
        Running::start(&mut rocinante(words(&line))).that_waits()
    }

    fn client_line(&self, command: &str) -> String {
        format!("{command} --netdev udp --bind {} {}", self.client, self.server)
    }

    /// Runs the client of a command to its end.
    fn call(&self, command: &str) -> Done {
        run(&self.client_line(command))
    }
}

/// A command that was stopped some time after it had begun, which `stop_after` returns for a time.
/// It has results, on a busy machine only after a longer time.
fn with_results(stop_after: impl Fn(Duration) -> Done) -> Done {
    let [short, longer, longest] = [700, 3_000, 15_000].map(Duration::from_millis);
    for time in [short, longer] {
        let done = stop_after(time);
        if done.json()["results"].as_array().is_some_and(|results| !results.is_empty()) {
            return done;
        }
    }
    stop_after(longest)
}

/// Runs both sides to their ends.
#[track_caller]
fn both(server: &str, client: &str) -> (Done, Done) {
    let addresses = Addresses::new();
    let server = addresses.serve(server);
    let client = addresses.call(client);
    (server.finish(), client)
}
