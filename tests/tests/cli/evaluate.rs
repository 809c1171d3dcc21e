//! `rocinante-bench evaluate`: which rows there are, after every kind of end, and not their values.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rocinante_tests::harness::wait_until;
use rocinante_tests::running::{PATIENCE, install, install_script};
use rocinante_tests::{need, require};
use serde_json::Value;
use tempfile::TempDir;

use super::{Done, Running, command, rocinante_bench, schema, words};

/// A directory that is removed with the test.
pub(super) struct Dir(TempDir);

impl Dir {
    pub(super) fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    /// A directory below, which does not exist at first.
    pub(super) fn path(&self) -> PathBuf {
        self.0.path().join("report")
    }

    pub(super) fn read(&self, file: &str) -> String {
        let path = self.path().join(file);
        std::fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()))
    }

    /// The lines of rows that are whole, by the row's key. Panics if one is there twice.
    fn rows(&self) -> BTreeMap<String, String> {
        let mut rows = BTreeMap::new();
        let text = std::fs::read_to_string(self.path().join("rows.jsonl")).unwrap_or_default();
        for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            let row: Value = serde_json::from_str(line).unwrap();
            schema::check(&row);
            if row.get("experiment").is_some() {
                let key = ["experiment", "mode", "x", "round"].map(|name| row[name].to_string());
                let before = rows.insert(key.join(" "), line.to_owned());
                assert_eq!(before, None, "a row is there twice");
            }
        }
        rows
    }

    /// The figures of the first round of a point. Panics if there are none.
    fn figures(&self, experiment: &str, mode: &str, x: u64) -> Value {
        let key = format!("{experiment:?} {mode:?} {x} 1");
        let rows = self.rows();
        let line = rows.get(&key).unwrap_or_else(|| panic!("no row {key} in {:?}", rows.keys()));
        let row: Value = serde_json::from_str(line).unwrap();
        assert!(row["figures"].is_object(), "{line}");
        row["figures"].clone()
    }
}

fn start(line: &str) -> Running {
    Running::start(&mut rocinante_bench(words(&format!("evaluate {line}"))))
}

fn evaluate(line: &str) -> Done {
    start(line).finish_within(Duration::from_secs(300))
}

const SMALL: &str = "--quick --patient --modes udp,tcp-blocking,kernel --pairs 1,2 \
                     --only size,scale,load,many_to_one,isolation,pressure";

/// Killed at some moments, a study has in the end the rows of one that was left alone.
#[test]
fn a_killed_study_goes_on_and_has_each_row_once() {
    require!(need::lab());
    let whole = Dir::new();
    let done = evaluate(&format!("{SMALL} --report {}", whole.path().display())).succeeded();
    assert!(done.err.contains("left: size: udp"), "progress: {}", done.err);
    let first = done.out.lines().find(|line| line.starts_with("| small messages, soon |"));
    assert!(first.is_some_and(|line| line.contains("µs")), "{}", done.out);
    let expected: BTreeSet<String> = whole.rows().into_keys().collect();
    // 4 sizes of 3 modes; pairs, senders and neighbours: 2 numbers of 2 modes each; 3 loads of 2
    // modes; a message of 2 modes.
    assert_eq!(expected.len(), 12 + 3 * 4 + 6 + 2, "{expected:?}");
    let dir = Dir::new();
    let mut study = start(&format!("{SMALL} --report {}", dir.path().display()));
    let mut before = BTreeMap::new();
    for rows in [1, 13] {
        let deadline = Instant::now() + 2 * PATIENCE;
        while dir.rows().len() < rows && study.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "{rows} rows never came");
            std::thread::sleep(Duration::from_millis(5));
        }
        study.child.kill();
        let kept = dir.rows();
        assert!(kept.len() >= rows, "{} of {rows} rows", kept.len());
        // A line that was being written.
        let cut = "{\"schema\":1,\"version\":\"0.1.0\",\"comm";
        let text = dir.read("rows.jsonl") + cut;
        std::fs::write(dir.path().join("rows.jsonl"), text).unwrap();
        before = kept;
        study = start(&format!("--resume {}", dir.path().display()));
        study.hears("the rows that are taken", |line| {
            assert!(line.contains("1 a line that was cut"), "{line}");
            line.contains("rows are taken")
        });
    }
    let done = study.finish_within(Duration::from_secs(300)).succeeded();
    let after = dir.rows();
    assert_eq!(after.keys().cloned().collect::<BTreeSet<_>>(), expected);
    // Only a row of a mode that could not be had is measured again.
    let mut figures = before.iter().filter(|(_, line)| !line.contains("missing"));
    assert!(figures.all(|(key, line)| after[key] == *line), "{}", done.err);
    a_report_is_complete(&whole);
    a_report_is_complete(&dir);
    // There is nothing left to measure.
    let again = evaluate(&format!("--resume {}", dir.path().display())).succeeded();
    assert_eq!(dir.rows().into_keys().collect::<BTreeSet<_>>(), expected, "{}", again.err);
}

#[track_caller]
fn a_report_is_complete(dir: &Dir) {
    let (text, page) = (dir.read("report.md"), dir.read("report.html"));
    for part in ["Which to use when", "small messages, soon", "Jain", "not measured, because"] {
        assert!(text.contains(part) && page.contains(part), "{part} is not in {text}");
    }
    for file in ["size-write_gbps.svg", "scale-sum_gbps.svg", "load-p99_us.svg"] {
        assert!(text.contains(file), "{file} is not in {text}");
        let svg = dir.read(file);
        assert!(svg.contains("tcp-blocking") != file.starts_with("load") && svg.contains("udp"));
        // A mode that was not measured has no line.
        assert!(!svg.contains("kernel"), "{file}");
    }
    assert_eq!(page.matches("<svg").count(), page.matches("<figure>").count());
    assert!(page.matches("<svg").count() >= 8, "plots are inside");
    for outside in ["<script", "<img", "<link", " src=", "url("] {
        assert!(!page.contains(outside), "{outside}: the file stands alone");
    }
    // The reason of a mode that cannot be had, and where its figures would be.
    let row = text.lines().find(|line| line.starts_with("| kernel |")).unwrap();
    assert!(row.contains("it needs --devices with --local and --remote"), "{row}");
}

/// The least time of 7 retries with an ACK timeout of 14.
const RETRIES_MS: f64 = 7.0 * 4.096e-3 * (1u32 << 14) as f64;

#[track_caller]
fn number(figures: &Value, name: &str) -> f64 {
    figures[name].as_f64().unwrap_or_else(|| panic!("no {name} in {figures}"))
}

/// The sender saw an error, and new programs worked.
#[track_caller]
fn ended_and_works_again(figures: &Value) {
    assert_eq!(number(figures, "errors"), 1.0, "{figures}");
    assert!(number(figures, "error_ms") > 0.0 && number(figures, "again_ms") > 0.0, "{figures}");
    assert!(figures.get("stall_ms").is_none(), "{figures}");
}

/// A peer is killed, a link is pulled, a container moves: the sender has an error, and no sooner
/// than its retries take. Then new programs work.
#[test]
fn what_ends_a_connection_is_seen_by_its_sender() {
    require!(need::lab());
    require!(need::vxlan());
    let dir = Dir::new();
    evaluate(&format!("--patient --only failure --modes udp --report {}", dir.path().display()))
        .succeeded();
    for event in [0, 1, 3] {
        ended_and_works_again(&dir.figures("failure", "udp", event));
    }
    let pulled = number(&dir.figures("failure", "udp", 1), "error_ms");
    assert!(pulled >= RETRIES_MS, "before all retries, after {pulled} ms");
    let report = dir.read("report.md");
    for row in ["| udp | killed peer |", "| udp | pulled link |", "| udp | moved container |"] {
        assert!(report.contains(row), "{report}");
    }
    let tcp = Dir::new();
    let line = "--quick --patient --only failure --modes tcp-blocking";
    evaluate(&format!("{line} --report {}", tcp.path().display())).succeeded();
    ended_and_works_again(&tcp.figures("failure", "tcp-blocking", 0));
}

/// The agent is killed and starts again: connections on ports that it opened go on.
#[test]
fn a_restarted_agent_disturbs_no_connection() {
    require!(need::lab());
    require!(need::machine_root());
    let agent = Path::new(env!("CARGO_BIN_EXE_rocinante-agent-under-test"));
    let (dir, programs) = (Dir::new(), programs(&[(agent, "rocinante-agent")]));
    let line = "evaluate --quick --patient --only failure --modes packet-agent --report";
    let bench = programs.0.path().join("rocinante-bench");
    let mut study = command(bench.to_str().unwrap(), words(line));
    Running::start(study.arg(dir.path())).finish_within(Duration::from_secs(300)).succeeded();
    ended_and_works_again(&dir.figures("failure", "packet-agent", 0));
    let restarted = dir.figures("failure", "packet-agent", 2);
    assert_eq!(number(&restarted, "errors"), 0.0, "{restarted}");
    assert!(number(&restarted, "stall_ms") > 0.0 && number(&restarted, "again_ms") > 0.0);
}

/// A directory of programs, with `rocinante-bench` in it.
fn programs(more: &[(&Path, &str)]) -> Dir {
    let dir = Dir::new();
    let bench = Path::new(env!("CARGO_BIN_EXE_rocinante-bench-under-test"));
    for (program, name) in [(bench, "rocinante-bench")].iter().chain(more) {
        install(program, &dir.0.path().join(name), 0o755);
    }
    dir
}

/// A study by the program of such a directory.
fn study(programs: &Dir, modes: &str, dir: &Dir) -> Command {
    let line = format!("--quick --patient --only size --modes {modes} --report");
    let mut study =
        command(programs.0.path().join("rocinante-bench").to_str().unwrap(), ["evaluate"]);
    study.args(line.split(' ')).arg(dir.path());
    study
}

/// Programs of others print figures of all that they are asked for.
#[test]
fn unmodified_programs_are_measured() {
    require!(need::lab());
    require!(need::program("ib_write_bw"));
    require!(need::program("ucx_perftest"));
    // Cargo builds them beside this program.
    let built = |name| std::env::current_exe().unwrap().with_file_name(name);
    let programs = programs(&[
        (Path::new(env!("CARGO_BIN_EXE_rocinante-under-test")), "rocinante"),
        (&built("librocinante_ibverbs.so"), "libibverbs.so.1"),
        (&built("librocinante_paths.so"), "librocinante_paths.so"),
    ]);
    let dir = Dir::new();
    let mut study = study(&programs, "perftest-udp,ucx-udp,bare-udp", &dir);
    Running::start(&mut study).finish_within(Duration::from_secs(300)).succeeded();
    for (mode, size, names) in [
        ("perftest-udp", 64, &["p50_us", "p999_us", "p99_us"][..]),
        ("perftest-udp", 1 << 20, &["read_gbps", "send_gbps", "write_gbps"]),
        ("ucx-udp", 64, &["p50_us"]),
        ("ucx-udp", 1 << 20, &["send_gbps"]),
    ] {
        let figures = dir.figures("size", mode, size);
        let has: Vec<&str> = figures.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(has, names, "{mode}");
        assert!(names.iter().all(|name| number(&figures, name) > 0.0), "{mode}: {figures}");
    }
    assert!(number(&dir.figures("size", "bare-udp", 1 << 20), "write_gbps") > 0.0);
    let report = dir.read("report.md");
    assert!(report.contains("| perftest-udp | unmodified perftest"), "{report}");
}

/// A program that plays `rocinante run`, by the name of the program and the test.
const ACTOR: &str = "#!/bin/sh
case \"$*\" in
    *ib_write_lat*)
        echo ' #bytes #iterations t_min[usec] t_max[usec] t_typical[usec] t_avg[usec] \
t_stdev[usec] 99% percentile[usec] 99.9% percentile[usec]'
        echo ' 64 3000 1 9 -3 4 1 8 9';;
    *ib_write_bw*) echo 'it works' >&2; kill -9 $$;;
    *tag_lat*) echo 'iterations,50.0_percentile_lat,avg_lat'; echo ' 3000,NaN,1';;
    *tag_bw*) echo 'iterations,50.0_perc';;
esac
";

/// Programs that are not there, die, lie, or print half of it leave a row with the reason.
#[test]
fn programs_that_fail_say_why() {
    require!(need::lab());
    let tools = Dir::new();
    let path = std::env::var_os("PATH").unwrap();
    let ip = std::env::split_paths(&path).map(|at| at.join("ip")).find(|at| at.exists());
    std::os::unix::fs::symlink(ip.expect("the lab has it"), tools.0.path().join("ip")).unwrap();
    let programs = programs(&[]);
    let reasons = |modes: &str| {
        let dir = Dir::new();
        let mut study = study(&programs, modes, &dir);
        study.env("PATH", tools.0.path());
        let done = Running::start(&mut study).finish_within(Duration::from_secs(120));
        done.failed(1, &["nothing was measured"]);
        let rows = dir.rows();
        let reason = |(key, row): (&String, &String)| {
            let row: Value = serde_json::from_str(row).unwrap();
            (key.clone(), row["missing"].as_str().unwrap().to_owned())
        };
        rows.iter().map(reason).collect::<BTreeMap<_, _>>()
    };
    let of = |reasons: &BTreeMap<String, String>, mode: &str, size: u64, words: &[&str]| {
        let why = &reasons[&format!("\"size\" {mode:?} {size} 1")];
        assert!(words.iter().all(|word| why.contains(word)), "{mode}, {size}: {why}");
    };
    let why = reasons("perftest-udp,ucx-udp,podman-udp");
    of(&why, "perftest-udp", 64, &["ib_write_lat", "install perftest"]);
    of(&why, "perftest-udp", 1 << 20, &["ib_write_bw, ib_send_bw, ib_read_bw"]);
    of(&why, "ucx-udp", 64, &["ucx_perftest", "install ucx-utils"]);
    of(&why, "podman-udp", 64, &["not found in PATH: podman"]);
    for name in ["ib_write_lat", "ib_write_bw", "ucx_perftest"] {
        std::fs::write(tools.0.path().join(name), "").unwrap();
    }
    of(&reasons("ucx-udp"), "ucx-udp", 64, &["rocinante is not there: cargo build"]);
    install_script(ACTOR, &programs.0.path().join("rocinante"), 0o755);
    let why = reasons("perftest-udp,ucx-udp");
    of(&why, "perftest-udp", 64, &["ib_write_lat: figures that cannot be", "64 3000 1 9 -3"]);
    of(&why, "perftest-udp", 1 << 20, &["ib_write_bw: exit status: 1: it works", "signal: 9"]);
    of(&why, "ucx-udp", 64, &["ucx_perftest: figures that cannot be", "3000,NaN,1"]);
    of(&why, "ucx-udp", 1 << 20, &["ucx_perftest: no figures: iterations,50.0_perc"]);
}

/// Programs that run, and what they have started, do not outlive a study that is killed.
#[test]
fn programs_end_with_a_study_that_is_killed() {
    require!(need::lab());
    require!(need::program("ucx_perftest"));
    let (programs, dir) = (programs(&[]), Dir::new());
    let pids = |dir: &Dir| {
        let text = std::fs::read_to_string(dir.0.path().join("pids")).unwrap_or_default();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let script = format!(
        "#!/bin/sh\nsleep 600 &\necho $! >> {0}/pids; echo $$ >> {0}/pids; wait\n",
        programs.0.path().display()
    );
    install_script(script, &programs.0.path().join("rocinante"), 0o755);
    let mut study = Running::start(&mut study(&programs, "ucx-udp", &dir));
    wait_until("both sides run", || pids(&programs).len() == 4);
    study.child.kill();
    let live = |pid: &String| Path::new("/proc").join(pid).exists();
    wait_until("all have ended", || !pids(&programs).iter().any(live));
}

/// A container of podman is measured like a process, and nothing of it is left.
#[test]
fn containers_of_podman_are_measured() {
    require!(need::lab());
    require!(need::machine_root());
    require!(need::program("podman"));
    let (programs, dir) = (programs(&[]), Dir::new());
    let mut study = study(&programs, "podman-udp", &dir);
    study.args(["--only", "start"]);
    Running::start(&mut study).finish_within(Duration::from_secs(300)).succeeded();
    let start = dir.figures("start", "podman-udp", 4);
    assert_eq!((number(&start, "got_udp"), number(&start, "lost")), (4.0, 0.0), "{start}");
    assert!(number(&dir.figures("size", "podman-udp", 1 << 20), "write_gbps") > 0.0);
    let bench = programs.0.path().join("rocinante-bench");
    let file = |at: &Path| std::fs::metadata(at).ok().map(|it| (it.dev(), it.ino()));
    let own = file(&bench).unwrap();
    // The container has the program by another name.
    let of_it = || {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        all.filter(|entry| {
            file(&entry.path().join("exe")) == Some(own)
                || std::fs::read(entry.path().join("cmdline")).is_ok_and(|line| {
                    String::from_utf8_lossy(&line).contains(bench.to_str().unwrap())
                })
        })
        .count()
    };
    wait_until("all processes have ended", || of_it() == 0);
}

/// Each program has its backend, each control its verdict, and figures agree with each other.
#[test]
fn counts_add_up() {
    require!(need::lab());
    require!(need::nft());
    require!(need::tc());
    require!(need::ethtool());
    let dir = Dir::new();
    let line = "--quick --patient --only start,control,rate,pressure --modes udp,tcp-blocking";
    evaluate(&format!("{line} --report {}", dir.path().display())).succeeded();
    for programs in [2, 20] {
        let start = dir.figures("start", "udp", programs);
        assert_eq!((number(&start, "got_udp"), number(&start, "lost")), (programs as f64, 0.0));
        let [median, last] =
            ["first_byte_median_ms", "first_byte_last_ms"].map(|name| number(&start, name));
        assert!(0.0 < median && median <= last, "{start}");
        assert!(number(&start, "attach_last_ms") >= number(&start, "attach_median_ms"));
        let tcp = dir.figures("start", "tcp-blocking", programs);
        assert!(number(&tcp, "lost") == 0.0 && tcp.get("got_udp").is_none(), "{tcp}");
    }
    for (mode, name) in [
        ("udp", "container_ms"),
        ("udp", "connections_per_s"),
        ("udp", "held_1000_ms"),
        ("tcp-blocking", "connections_per_s"),
    ] {
        assert!(number(&dir.figures("start", mode, 2), name) > 0.0, "{mode}: {name}");
    }
    let verdicts = dir.figures("control", "udp", 0);
    let of = |name| number(&verdicts, name);
    assert!(of("controls") > 0.0 && of("as_documented") > 0.0, "{verdicts}");
    let sum = of("as_documented") + of("not_to_be_had") + of("different");
    assert_eq!(of("controls"), sum, "{verdicts}");
    for mode in ["udp", "tcp-blocking"] {
        let control = dir.figures("control", mode, 100);
        let reached = number(&control, "reached_gbps");
        assert!(reached > 0.0 && (number(&control, "of_asked") - reached / 0.1).abs() < 1e-6);
        assert!(number(&dir.figures("rate", mode, 1), "1_thread_mops") > 0.0);
        assert!(number(&dir.figures("rate", mode, 16), "2_threads_mops") > 0.0);
    }
    // 64 KiB in packets of 4 KiB and at least one acknowledgement, each with Ethernet, IP, UDP,
    // BTH and ICRC; the first packet has a RETH.
    let pressure = dir.figures("pressure", "udp", 65_536);
    let packets = number(&pressure, "packets");
    assert!((17.0..40.0).contains(&packets), "{pressure}");
    let headers = 14.0 + 20.0 + 8.0 + 12.0 + 4.0;
    assert!(number(&pressure, "header_bytes") >= packets * headers, "{pressure}");
    assert!(number(&dir.figures("pressure", "tcp-blocking", 65_536), "packets") >= 9.0);
    let report = dir.read("report.md");
    for part in ["controls as documented", "header bytes for 64.0 KiB", "| udp | 20 programs |"] {
        assert!(report.contains(part), "{part} is not in {report}");
    }
}

/// Rows of another version, and lines that are none, are not taken.
#[test]
fn only_rows_of_this_version_are_taken() {
    require!(need::lab());
    let dir = Dir::new();
    let line =
        format!("--quick --patient --only load --modes udp --report {}", dir.path().display());
    evaluate(&line).succeeded();
    let rows = dir.rows();
    let text = dir.read("rows.jsonl").replace(env!("CARGO_PKG_VERSION"), "0.0.1");
    std::fs::write(dir.path().join("rows.jsonl"), text + "hello\n").unwrap();
    let line =
        format!("--resume {} --quick --patient --only load --modes udp", dir.path().display());
    let done = evaluate(&line).succeeded();
    for words in ["0 rows are taken", "4 of version 0.0.1", "1 no row"] {
        assert!(done.err.contains(words), "{words}: {}", done.err);
    }
    assert!(dir.rows().keys().eq(rows.keys()));
    let left = dir.read("left-out.jsonl");
    assert_eq!((left.lines().count(), left.matches("0.0.1").count()), (5, 4), "{left}");
    // Another study does not begin there.
    evaluate(&format!("--quick --report {}", dir.path().display()))
        .failed(1, &["has a study already", "--resume"]);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let dir = Dir::new();
    let at = dir.path();
    let at = at.display();
    for (line, words) in [
        (format!("--report {at} --only scael"), ["\"scael\"", "size, scale, load, many_to_one"]),
        (format!("--report {at} --modes tcp"), ["\"tcp\"", "udp, packet, afxdp"]),
        (format!("--report {at} --pairs 0"), ["--pairs 0", "from 1 to 100"]),
        (format!("--report {at} --pairs 1,101"), ["--pairs 101", "from 1 to 100"]),
        (format!("--report {at} --resume {at}"), ["--report", "cannot be used with"]),
        (format!("--report {at} --devices mlx5_0"), ["--local", "required"]),
        ("--quick".into(), ["--report", "required"]),
    ] {
        evaluate(&line).failed(2, &words);
    }
    assert!(!dir.path().exists(), "nothing was begun");
    evaluate(&format!("--resume {at}")).failed(1, &["has no study", "--report"]);
    std::fs::create_dir(dir.path()).unwrap();
    std::fs::write(dir.path().join("letter.txt"), "dear").unwrap();
    evaluate(&format!("--report {at}")).failed(1, &["files of others"]);
    evaluate(&format!("--report {at}/letter.txt")).failed(1, &["letter.txt"]);
    // The root of /proc takes no directory.
    evaluate("--report /proc/study").failed(1, &["/proc/study"]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was left there");
}

/// A mode that cannot be had is in the rows, with the reason.
#[test]
fn modes_that_cannot_be_had_say_why() {
    require!(need::lab());
    let (dir, tools) = (Dir::new(), Dir::new());
    let path = std::env::var_os("PATH").unwrap();
    let program =
        |name: &str| std::env::split_paths(&path).map(|at| at.join(name)).find(|at| at.exists());
    let ip = program("ip").expect("the lab has it");
    std::os::unix::fs::symlink(ip, tools.0.path().join("ip")).unwrap();
    let line = format!(
        "evaluate --quick --patient --only size --modes iperf3,kernel --report {}",
        dir.path().display()
    );
    let mut without = rocinante_bench(words(&line));
    let done =
        Running::start(without.env("PATH", tools.0.path())).finish_within(Duration::from_secs(120));
    done.failed(1, &["nothing was measured"]);
    let reason = |dir: &Dir, mode: &str| -> String {
        let mode = format!("\"mode\":\"{mode}\"");
        let rows = dir.rows();
        let row = rows.values().find(|line| line.contains(&mode)).unwrap();
        let row: Value = serde_json::from_str(row).unwrap();
        assert!(row.get("figures").is_none(), "{row}");
        row["missing"].as_str().unwrap().to_owned()
    };
    let iperf3 = reason(&dir, "iperf3");
    assert!(iperf3.contains("cannot start iperf3") && iperf3.contains("install it"), "{iperf3}");
    assert!(reason(&dir, "kernel").contains("--devices"));
    assert!(dir.path().join("report.html").exists(), "the report says it, too");
    // One processor is too few for two sides that spin.
    let Some(taskset) = program("taskset") else { return };
    let one = Dir::new();
    let bench = env!("CARGO_BIN_EXE_rocinante-bench-under-test");
    let line = format!(
        "--cpu-list 0 {bench} evaluate --quick --patient --only load --modes udp --report {}",
        one.path().display()
    );
    let mut alone = command(taskset.to_str().unwrap(), words(&line));
    Running::start(&mut alone)
        .finish_within(Duration::from_secs(120))
        .failed(1, &["two processors"]);
    assert!(reason(&one, "udp").contains("this machine has one"));
}
