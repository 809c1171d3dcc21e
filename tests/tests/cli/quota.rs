//! Limits that the processes of a container keep together, by the API and by `libibverbs`.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::IpAddr;
use std::process::{ChildStdin, ChildStdout, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rocinante::device::Backend;
use rocinante::{Access, Context, Cq, Mr, OpenOptions, VerbsError};
use rocinante_lab::{ChildGuard, Container, Lab, LabConfig, exit_with_parent};
use rocinante_tests::alone::myself;
use rocinante_tests::capi::Library;
use rocinante_tests::harness::wait_until;
use rocinante_tests::{need, require, test_name};

use super::handed::Agent;

/// Set in a program that follows the test's commands: its address.
const PROGRAM: &str = "ROCINANTE_QUOTA_PROGRAM";

/// A process in a container.
struct Program {
    child: ChildGuard,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Program {
    fn start(container: &Container, agent: &Agent, test: &str) -> Self {
        let mut command = agent.asker(&myself(test));
        command.env(PROGRAM, container.ipv4().to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = container.spawn(&mut command).unwrap();
        let to = child.child_mut().stdin.take().unwrap();
        let from = BufReader::new(child.child_mut().stdout.take().unwrap());
        Self { child, to, from }
    }

    fn tell(&mut self, command: &str) -> String {
        writeln!(self.to, "{command}").unwrap();
        loop {
            let mut line = String::new();
            assert!(self.from.read_line(&mut line).unwrap() > 0, "it ended");
            if let Some((_, answer)) = line.split_once('@') {
                return answer.trim().to_owned();
            }
        }
    }

    #[track_caller]
    fn does(&mut self, command: &str, answer: &str) {
        assert_eq!(self.tell(command), answer, "{command}");
    }
}

/// In a program of [`Program::start`]: follows commands until there are no more. Returns at once
/// in any other.
fn be_program() {
    let Ok(own) = std::env::var(PROGRAM) else { return };
    exit_with_parent();
    let own: IpAddr = own.parse().unwrap();
    let mut contexts = Vec::<Context>::new();
    let (mut queues, mut regions) = (Vec::<Cq>::new(), Vec::<Mr>::new());
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (verb, number) = line.split_once(' ').unwrap_or((&line, "0"));
        let number: usize = number.parse().unwrap();
        let done = match verb {
            "open" => OpenOptions::new().open(own).map(|context| contexts.push(context)),
            // A port that no interface has.
            "open-none" => OpenOptions::new().netdev(Backend::Sim).open(own).map(drop),
            "cq" => (0..number)
                .try_for_each(|_| contexts[0].create_cq(16).map(|queue| queues.push(queue))),
            // A domain and a region.
            "mr" => {
                let region = contexts[0].alloc_pd().allocate(number, Access::LOCAL_WRITE);
                region.map(|region| regions.push(region))
            }
            "query" => {
                let limits = contexts[0].query_device().limits;
                println!("@{} {} {}", limits.max_qp, limits.max_cq, limits.max_mr);
                continue;
            }
            "drop" => {
                queues.clear();
                regions.clear();
                Ok(())
            }
            "close" => {
                contexts.clear();
                Ok(())
            }
            other => panic!("{other}"),
        };
        match done {
            Ok(()) => println!("@done"),
            Err(error @ VerbsError::Quota { .. }) => println!("@quota {}", error.errno()),
            Err(error) => println!("@{error}"),
        }
    }
    std::process::exit(0);
}

/// Puts a class for all containers in force.
fn limit(agent: &Agent, rdma_max: &str) {
    let path = agent.config();
    let text = fs::read_to_string(&path).unwrap();
    let (rest, _) = text.split_once("[[class]]").unwrap_or((&text, ""));
    let class = format!("[[class]]\nname = \"default\"\nrdma_max = {rdma_max:?}\n");
    fs::write(path, format!("{rest}{class}")).unwrap();
    kill(Pid::from_raw(agent.id().cast_signed()), Signal::SIGHUP).unwrap();
}

#[test]
fn processes_of_a_container_share_its_limits_and_get_eagain_and_enomem() {
    be_program();
    require!(need::machine_root());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let mut agent = Agent::start(lab.host());
    let (again, no_memory) = (format!("quota {}", libc::EAGAIN), format!("quota {}", libc::ENOMEM));
    let [here, there] = [0, 1].map(|index| lab.container(index));
    let program = |agent: &Agent, container| Program::start(container, agent, test_name!());
    let [mut one, mut two, mut other] =
        [here, here, there].map(|container| program(&agent, container));
    one.does("open", "done");
    one.does("query", "16384 16384 65536");
    limit(&agent, "hca_handle=3 hca_object=20 mr_bytes=64k");
    wait_until("the limits hold", || one.tell("query") == "20 20 20");
    one.does("cq 10", "done");
    for program in [&mut two, &mut other] {
        program.does("open", "done");
        wait_until("it has its limits", || program.tell("query") == "20 20 20");
    }
    two.does("cq 10", "done");
    two.does("cq 1", &again);
    two.does("mr 4096", &again);
    one.does("cq 1", &again);
    one.does("open", "done");
    two.does("open", &again);
    other.does("cq 16", "done");
    other.does("mr 65536", "done");
    other.does("mr 1", &no_memory);
    other.does("cq 2", "done");
    one.does("drop", "done");
    two.does("mr 40000", "done");
    one.does("mr 40000", &no_memory);
    one.does("mr 25536", "done");
    two.does("drop", "done");
    one.does("mr 40000", "done");
    // Higher and lower.
    limit(&agent, "hca_object=30");
    wait_until("the limits are higher", || two.tell("query") == "30 30 30");
    two.does("cq 26", "done");
    limit(&agent, "hca_object=4");
    wait_until("the limits are lower", || one.tell("query") == "4 4 4");
    one.does("cq 1", &again);
    // A killed process gives back, once the agent has seen its end.
    two.child.kill();
    one.does("drop", "done");
    wait_until("it is given back", || one.tell("cq 4") == "done" || one.tell("drop") != "done");
    one.does("cq 1", &again);
    // The next agent learns what there is.
    agent.kill();
    agent.start_again(lab.host());
    let mut three = program(&agent, here);
    three.does("open", "done");
    wait_until("the first has come", || {
        three.tell("cq 1") == again || three.tell("drop") != "done"
    });
    one.does("drop", "done");
    three.does("drop", "done");
    three.does("cq 4", "done");
    one.does("cq 1", &again);
}

/// A context is charged before its ports are opened, and an open that fails gives it back.
#[test]
fn a_program_at_its_limit_of_contexts_opens_no_port() {
    be_program();
    require!(need::machine_root());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let mut agent = Agent::start(lab.host());
    limit(&agent, "hca_handle=1");
    // It may not have read them yet.
    agent.kill();
    agent.start_again(lab.host());
    let again = format!("quota {}", libc::EAGAIN);
    let [mut one, mut two] =
        [(); 2].map(|()| Program::start(lab.container(0), &agent, test_name!()));
    let sockets = format!("/proc/{}/net/packet", one.child.id());
    let ports = || fs::read_to_string(&sockets).unwrap().lines().count();
    let refused = one.tell("open-none");
    assert!(refused.contains("the simulator"), "{refused}");
    let none = ports();
    two.does("open", "done");
    let of_two = ports();
    assert!(of_two > none, "it is a packet port");
    // Of a port that there is not, too: the limit comes first.
    one.does("open-none", &again);
    one.does("open", &again);
    assert_eq!(ports(), of_two);
    two.does("close", "done");
    one.does("open", "done");
    assert_eq!(ports(), of_two);
    two.does("open", &again);
}

#[test]
fn a_program_of_libibverbs_gets_the_errno_of_the_kernels_controller() {
    require!(need::machine_root());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let mut agent = Agent::start(lab.host());
    limit(&agent, "hca_handle=1 hca_object=9 mr_bytes=10000");
    // It may not have read them yet.
    agent.kill();
    agent.start_again(lab.host());
    let library = Library::new();
    let mut command = library.command(&format!("{} 9 10000", library.script("quota.py")));
    command.env("ROCINANTE_AGENT", agent.socket());
    let done = super::start_command(lab.container(0), &mut command).finish().succeeded();
    assert!(done.out.contains("done"), "{}{}", done.out, done.err);
}
