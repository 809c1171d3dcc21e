//! Texts that are committed beside the tests: a change of behaviour is a diff.

/// Names the environment variable that, set to 1, writes the snapshots anew instead of comparing.
pub const BLESS_VARIABLE: &str = "ROCINANTE_BLESS";

/// Compares `text` with `tests/data/snapshots/<name>`. Panics if they differ, with the first line
/// that does and the command that accepts the new text.
pub fn assert_snapshot(name: &str, text: &str) {
    let path = crate::captures::data_dir().join("snapshots").join(name);
    if std::env::var(BLESS_VARIABLE).is_ok_and(|value| value == "1") {
        let folder = path.parent().expect("a directory");
        std::fs::create_dir_all(folder).expect("a writable directory");
        std::fs::write(&path, text).expect("a writable snapshot");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    if let Some(difference) = first_difference(&committed, text) {
        panic!(
            "{} is no longer true: {difference}\nif that is meant, accept it: \
             {BLESS_VARIABLE}=1 cargo test -p rocinante-tests, and read the diff",
            path.display()
        );
    }
}

fn first_difference(committed: &str, now: &str) -> Option<String> {
    if committed == now {
        return None;
    }
    let (mut old, mut new) = (committed.lines(), now.lines());
    for line in 1.. {
        match (old.next(), new.next()) {
            (None, None) => break,
            (old, new) if old == new => {}
            (old, new) => {
                let [old, new] = [old, new].map(|line| line.unwrap_or("(nothing)"));
                return Some(format!("line {line}\n  was: {old}\n  is:  {new}"));
            }
        }
    }
    Some("only the line ends differ".into())
}

#[cfg(test)]
mod tests {
    use super::first_difference;

    #[test]
    fn the_first_difference_is_named() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n").unwrap(), "line 2\n  was: b\n  is:  c");
        assert!(first_difference("a\n", "a\nb\n").unwrap().contains("was: (nothing)"));
        assert!(first_difference("a\n", "a").unwrap().contains("line ends"));
    }
}
