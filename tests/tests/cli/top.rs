//! `rocinante top` in a terminal.

use super::handed::{self, Agent};
use super::{command, rocinante, start, words};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rocinante_lab::{ChildGuard, Lab, LabConfig, Tbf};
use rocinante_tests::running::{PATIENCE, hand_on_no_ignored_signal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The command in a terminal of its own.
struct Terminal {
    master: Option<File>,
    before: String,
    screen: vt100::Parser,
    child: ChildGuard,
}

/// Settings of a terminal that a program may change.
fn modes(of: &Termios) -> String {
    let Termios { input_modes, output_modes, control_modes, local_modes, .. } = of;
    format!("{input_modes:?} {output_modes:?} {control_modes:?} {local_modes:?}")
}

fn winsize(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }
}

impl Terminal {
    /// Starts a command line on the host of a lab. Signals of the terminal are for it only if
    /// `controls`.
    fn start(lab: &Lab, line: &str, (columns, rows): (u16, u16), controls: bool) -> Self {
        hand_on_no_ignored_signal();
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        tcsetwinsize(&master, winsize(columns, rows)).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap();
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(nix::libc::O_NOCTTY);
        let slave = options.open(path.to_str().unwrap()).unwrap();
        let before = modes(&tcgetattr(&master).unwrap());
        let program = rocinante(words(line));
        let mut command = command("setsid", if controls { vec!["--ctty"] } else { vec![] });
        command.arg(program.get_program()).args(program.get_args()).stderr(Stdio::piped());
        command.stdin(slave.try_clone().unwrap()).stdout(slave);
        let child = lab.host().spawn(&mut command).unwrap();
        // It has copies of the other end until it is dropped.
        drop(command);
        let screen = vt100::Parser::new(rows, columns, 0);
        Self { master: Some(master.into()), before, screen, child }
    }

    /// Reads until the screen `suits`. Panics if it never does.
    #[track_caller]
    fn shows(&mut self, what: &str, suits: impl Fn(&vt100::Screen) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !suits(self.screen.screen()) {
            let contents = self.screen.screen().contents();
            assert!(Instant::now() < deadline, "it never showed {what}: {contents}");
            let mut bytes = [0; 4096];
            let master = self.master.as_mut().unwrap();
            let tenth = Timespec::try_from(Duration::from_millis(100)).unwrap();
            if poll(&mut [PollFd::new(master, PollFlags::IN)], Some(&tenth)).unwrap() > 0 {
                let count = master.read(&mut bytes).unwrap();
                self.screen.process(&bytes[..count]);
            }
        }
    }

    #[track_caller]
    fn says(&mut self, words: &str) {
        self.shows(words, |screen| screen.contents().contains(words));
    }

    fn press(&mut self, keys: &str) {
        use std::io::Write as _;
        self.master.as_mut().unwrap().write_all(keys.as_bytes()).unwrap();
    }

    fn resize(&mut self, columns: u16, rows: u16) {
        tcsetwinsize(self.master.as_ref().unwrap(), winsize(columns, rows)).unwrap();
        self.screen.screen_mut().set_size(rows, columns);
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    /// Its exit status and standard error.
    #[track_caller]
    fn ended(mut self) -> (i32, String) {
        let status = self.child.wait(PATIENCE).unwrap().code().unwrap_or(-1);
        let mut text = String::new();
        self.child.child_mut().stderr.take().unwrap().read_to_string(&mut text).unwrap();
        (status, text)
    }

    /// Ends with this status, and with the terminal as it was.
    #[track_caller]
    fn restores(mut self, status: i32, words: &str) {
        self.shows("the first screen", |screen| {
            !screen.alternate_screen() && !screen.hide_cursor()
        });
        // The other end has no settings of its own once its session has ended.
        let (master, before) = (self.master.take().unwrap(), self.before.clone());
        let (ended, text) = self.ended();
        assert_eq!(ended, status, "{text}");
        assert!(text.contains(words), "{text}");
        assert_eq!(modes(&tcgetattr(&master).unwrap()), before);
    }
}

fn raw(terminal: &Terminal) -> bool {
    modes(&tcgetattr(terminal.master.as_ref().unwrap()).unwrap()) != terminal.before
}

/// From the pages of processes, in 20 columns and then in more.
#[test]
fn a_narrow_terminal_shows_containers_and_a_wide_one_queue_pairs() {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [client, server] = [0, 1].map(|index| lab.container(index));
    // Its peer is short of receives.
    let line = "perf send-bw --netdev udp -D 600 -s 1K -r 8 --json";
    let _waiting = start(server, line).that_waits();
    let writes = start(client, &format!("{line} {}", server.ipv4())).that_says(" send-bw ");
    let of = std::fs::read_link(format!("/proc/{}/ns/net", writes.child.id())).unwrap();
    let of = of.to_str().unwrap();
    let line = format!("top --agent off -i 0.3 {of}");
    let mut top = Terminal::start(&lab, &line, (20, 8), true);
    top.shows("a sender", |screen| {
        // The number of a queue pair, and a rate that is none.
        let text = screen.contents();
        text.lines().nth(3).is_some_and(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let rate = words.get(1).and_then(|word| word.parse::<f64>().ok());
            words[0].parse::<u32>().is_ok() && rate.is_some_and(|rate| rate > 0.0)
        })
    });
    assert!(raw(&top));
    top.resize(200, 20);
    top.says("RC RTS");
    top.says(&format!("{} ", server.ipv4()));
    top.says("peer has no receive: RNR ");
    top.says("peer's room ");
    // All containers of this machine, of which others may be many, and back again.
    top.press("\x1b");
    top.says("containers by tx");
    top.press(">");
    top.says("containers by rx");
    top.resize(1, 1);
    std::thread::sleep(Duration::from_millis(300));
    top.resize(20, 8);
    top.says("container");
    top.press("q");
    top.restores(0, "");
}

#[test]
fn signals_and_ctrl_c_restore_the_terminal() {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let start = || {
        let mut top = Terminal::start(&lab, "top --agent off -i 0.2", (80, 24), true);
        top.says("containers by");
        assert!(raw(&top));
        top
    };
    let signals = [(Signal::SIGTERM, 143), (Signal::SIGHUP, 129), (Signal::SIGINT, 130)];
    for (signal, status) in signals {
        let top = start();
        top.signal(signal);
        top.restores(status, &format!("stopped by {signal}"));
    }
    let mut top = start();
    top.press("\x03");
    top.restores(130, "stopped by SIGINT");
}

/// With and without the signal that a terminal sends when it vanishes.
#[test]
fn a_vanished_terminal_ends_it() {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    for (controls, expected, words) in [(true, 129, "SIGHUP"), (false, 1, "terminal has gone")] {
        let mut top = Terminal::start(&lab, "top --agent off -i 0.2", (80, 24), controls);
        top.says("containers by");
        top.master = None;
        let (status, text) = top.ended();
        assert_eq!(status, expected, "{text}");
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn without_a_terminal_it_names_stat() {
    let top = super::run("top --agent off");
    top.failed(2, &["no terminal", "`rocinante stat`"]);
}

/// What holds a container back is its agent's word, and the kernel's.
#[test]
fn an_agent_that_goes_away_and_comes_back_is_no_end() {
    rocinante_tests::require!(rocinante_tests::need::machine_root());
    rocinante_tests::require!(rocinante_tests::need::nft());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let mut agent = Agent::start(lab.host());
    let [client, server] = [0, 1].map(|index| lab.container(index));
    let line = "perf write-bw --netdev packet -D 600 -s 64K --json";
    let _waiting = handed::start(server, &agent, line).that_waits();
    let mut writes = handed::start(client, &agent, &format!("{line} {}", server.ipv4()));
    writes.says(" write-bw ");
    let place = agent.state().join("stat.sock");
    let line = format!("top -i 0.3 --sort name --agent {}", place.display());
    let mut top = Terminal::start(&lab, &line, (150, 12), true);
    top.says(client.host_end());
    top.says(server.host_end());
    agent.kill();
    top.says("no agent answers");
    top.says(client.host_end());
    agent.start_again(lab.host());
    top.shows("the keys", |screen| screen.contents().contains("q quit"));
    // A shaper of the operator's at the host's end.
    let shaper = lab.shape(1, &Tbf::mbit(200)).unwrap();
    top.says("host_end: ");
    top.says(" waited, ");
    drop(shaper);
    // A rule of the operator's, in the view of the container.
    top.press("\r");
    top.says("queue pairs by");
    let first = [client, server].map(|it| it.host_end()).into_iter().min().unwrap();
    top.says(first);
    let rule = format!("iifname {first} numgen inc mod 50 == 0 counter drop");
    let chain = "chain c { type filter hook forward priority 0; ";
    lab.host().nft(&format!("table bridge held {{ {chain} {rule}; }}; }}")).unwrap();
    top.says("dropped nft bridge held c=");
    top.press("q");
    top.restores(0, "");
}
