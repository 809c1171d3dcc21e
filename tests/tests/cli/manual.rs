//! Completions and man pages, made from the definition of the command line.

use super::{rocinante, run, words};
use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

/// The commands that `rocinante --help` lists.
fn commands() -> BTreeSet<String> {
    let help = run("--help").succeeded().out;
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let list = list.take_while(|line| !line.is_empty());
    let first = list.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    first.filter(|name| !name.is_empty() && *name != "help").map(str::to_owned).collect()
}

/// The long options that `rocinante COMMAND --help` lists.
fn options(command: &str) -> BTreeSet<String> {
    let help = run(&format!("{command} --help")).succeeded().out;
    let list = help.lines().filter_map(|line| {
        let option = line.trim_start();
        let long = &option[option.find("--").filter(|_| option.starts_with('-'))?..];
        long.split([' ', '[', '=']).next()
    });
    list.map(str::to_owned).collect()
}

/// bash's completions for the last word of `line`.
fn bash_offers(script: &str, line: &str) -> BTreeSet<String> {
    let asks = r#"
        source "$1"; COMP_WORDS=($2); [ "${2: -1}" != ' ' ] || COMP_WORDS+=('')
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE=$2; COMP_POINT=${#2}
        _rocinante rocinante "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}""#;
    let offered = Command::new("bash").args(["-uc", asks, "bash", script, line]).output().unwrap();
    assert!(offered.status.success(), "{}", String::from_utf8_lossy(&offered.stderr));
    words(&String::from_utf8_lossy(&offered.stdout)).into_iter().collect()
}

#[test]
fn bash_completes_commands_and_options() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(&file, run("completions bash").succeeded().out).unwrap();
    let script = file.path().to_str().unwrap();
    let commands = commands();
    assert!(commands.contains("pingpong") && commands.contains("completions"), "{commands:?}");
    let offered = bash_offers(script, "rocinante ");
    assert!(offered.is_superset(&commands), "{commands:?} but {offered:?}");
    // These are hidden: other programs have them now.
    assert!(!offered.contains("bench") && !offered.contains("lab-worker"), "{offered:?}");
    assert_eq!(bash_offers(script, "rocinante ping"), BTreeSet::from(["pingpong".into()]));
    for command in commands {
        // Also not those that are hidden, such as rping's -d.
        let offered = bash_offers(script, &format!("rocinante {command} --"));
        assert_eq!(offered, options(&command), "{command}");
    }
    let offered = bash_offers(script, "rocinante pingpong --netdev ");
    assert_eq!(offered, ["afxdp", "auto", "packet", "udp"].map(str::to_owned).into());
}

#[test]
fn each_shell_has_its_completions() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = run(&format!("completions {shell}")).succeeded().out;
        assert!(script.contains("pingpong") && script.contains("bind"), "{shell}:\n{script}");
    }
    run("completions tcsh").failed(2, &["tcsh", "possible values: bash"]);
}

#[test]
fn each_command_has_a_man_page_with_its_options() {
    let directory = tempfile::TempDir::new().unwrap();
    let directory = directory.path().join("man");
    assert!(rocinante(["man".as_ref(), directory.as_os_str()]).status().unwrap().success());
    let commands = commands();
    let mut expected: BTreeSet<String> =
        commands.iter().map(|command| format!("rocinante-{command}.1")).collect();
    expected.insert("rocinante.1".into());
    let written = fs::read_dir(&directory).unwrap();
    let written = written.map(|file| file.unwrap().file_name().into_string().unwrap());
    assert_eq!(written.collect::<BTreeSet<_>>(), expected);
    for command in &commands {
        let page = fs::read_to_string(directory.join(format!("rocinante-{command}.1"))).unwrap();
        // roff(7): a hyphen that is no sign of division.
        let page = page.replace("\\-", "-");
        assert!(page.contains(".TH "), "{page}");
        for option in options(command) {
            assert!(page.contains(&option), "rocinante-{command}.1 has no {option}:\n{page}");
        }
    }
    let page = fs::read_to_string(directory.join("rocinante.1")).unwrap().replace("\\-", "-");
    assert!(page.contains("rocinante-pingpong(1)") && !page.contains("lab-worker"), "{page}");
    let under_a_file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml/man");
    run(&format!("man {under_a_file}")).failed(1, &["rocinante man: ", "Cargo.toml/man"]);
}
