//! The names of other programs: called by one of them, through a link, `rocinante` works like that
//! program.

use std::ffi::OsString;
use std::path::Path;

/// The command line that `args` stand for. Their first word is the program's name.
pub(crate) fn expand(mut args: Vec<OsString>) -> Vec<OsString> {
    let name = args.first().and_then(|path| Path::new(path).file_name()?.to_str());
    let Some(words) = name.and_then(command) else { return args };
    args.splice(1..1, words.into_iter().map(OsString::from));
    args
}

/// The words of `rocinante` for a program of perftest, rdma-core or librdmacm.
fn command(name: &str) -> Option<Vec<String>> {
    let words = |words: &[&str]| Some(words.iter().map(|word| (*word).to_owned()).collect());
    match name {
        "rping" | "udaddy" | "mckey" | "ucmatose" => words(&[name]),
        "rdma_server" => words(&["rdma-server"]),
        "rdma_client" => words(&["rdma-client"]),
        "ibv_rc_pingpong" => words(&["pingpong", "--compat", "ibv"]),
        "ibv_uc_pingpong" => words(&["pingpong", "--compat", "ibv-uc"]),
        "ibv_ud_pingpong" => words(&["pingpong", "--compat", "ibv-ud"]),
        "ibv_srq_pingpong" => words(&["pingpong", "--compat", "ibv-srq"]),
        name => {
            let (test, kind) = name.strip_prefix("ib_")?.split_once('_')?;
            let known = ["send", "write", "read", "atomic"].contains(&test)
                && ["bw", "lat"].contains(&kind);
            if !known {
                return None;
            }
            words(&["perf", &format!("{test}-{kind}"), "--compat", "perftest"])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(line: &str) -> String {
        let words = expand(line.split(' ').map(OsString::from).collect());
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_link_is_the_program_of_its_name() {
        for (line, words) in [
            ("/usr/bin/ib_write_bw -F host", " perf write-bw --compat perftest -F host"),
            ("ib_atomic_lat", " perf atomic-lat --compat perftest"),
            ("ibv_srq_pingpong -g 0", " pingpong --compat ibv-srq -g 0"),
            ("./rping -s", " rping -s"),
            ("rdma_client -s x", " rdma-client -s x"),
        ] {
            let name = line.split(' ').next().unwrap();
            assert_eq!(expanded(line), format!("{name}{words}"));
        }
        for line in ["rocinante perf write-bw", "ib_write", "ib_write_bw2 -a", "/bin/ib_raw_bw"] {
            assert_eq!(expanded(line), line);
        }
    }
}
