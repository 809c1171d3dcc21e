//! A schedule of faults, in TOML.
//!
//! A rule begins at its own time, or when the rule ends that names it in `then`.

use std::collections::HashMap;
use std::time::Duration;

use serde::Deserialize;
use toml::Value;

use super::words::{Draft, add};
use super::{Names, Plan, RULES_MAX, Rule};

/// As it is in the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    seed: Option<u64>,
    fault: Vec<toml::Table>,
}

/// A rule, and the names by which rules follow each other.
struct Step {
    rule: Rule,
    name: Option<String>,
    then: Option<String>,
    has_time: bool,
}

pub(super) fn plan(text: &str, names: Names) -> Result<Plan, String> {
    let File { seed, fault } = toml::from_str(text).map_err(|error| one_line(&error))?;
    let read = |(index, table): (usize, toml::Table)| {
        step(table, names).map_err(|why| format!("[[fault]] number {}: {why}", index + 1))
    };
    let steps = fault.into_iter().enumerate().map(read).collect::<Result<Vec<Step>, String>>()?;
    if steps.is_empty() {
        return Err("there is no [[fault]]".into());
    }
    let mut rules = Vec::new();
    for rule in in_time(steps)? {
        add(&mut rules, rule)?;
    }
    Ok(Plan { seed, rules, text: text.to_owned() })
}

/// An error of the parser, with its line.
fn one_line(error: &toml::de::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().filter(|line| !line.contains('|')).map(str::trim);
    lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(": ")
}

fn step(table: toml::Table, names: Names) -> Result<Step, String> {
    let mut draft = Draft::default();
    let (mut name, mut then, mut draws) = (None, None, None);
    for (key, value) in table {
        match (key.as_str(), &value) {
            ("name", Value::String(text)) => name = Some(text.clone()),
            ("then", Value::String(text)) => then = Some(text.clone()),
            ("name" | "then", _) => return Err(format!("{key}: a name between quotes")),
            ("draws", Value::Integer(place)) if (0..RULES_MAX as i64).contains(place) => {
                draws = Some(*place as u8);
            }
            ("draws", _) => return Err("draws: the place of a rule, counted from 0".into()),
            ("seed", _) => return Err("seed stands before all rules".into()),
            _ => draft.set(&key, &as_word(&value).ok_or_else(|| wrong(&key))?, names)?,
        }
    }
    if draft.is_empty() {
        return Err("a rule needs a fault, such as loss = \"2%\"".into());
    }
    let has_time = draft.says("at");
    let rule = Rule { draws, ..draft.rule()? };
    Ok(Step { rule, name, then, has_time })
}

fn wrong(key: &str) -> String {
    format!("{key}: a number, a text between quotes, or a list of these")
}

/// A value, as a command line has it.
fn as_word(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        Value::Boolean(flag) => Some(flag.to_string()),
        Value::Array(values) if !values.is_empty() => {
            let words: Option<Vec<String>> = values.iter().map(as_word).collect();
            words.map(|words| words.join("+"))
        }
        Value::Array(_) | Value::Table(_) | Value::Datetime(_) => None,
    }
}

/// The rules, each with the time at which it begins. Error: a name that no rule has or that two
/// have, two beginnings of a rule, a rule that never ends before another, rules in a circle.
fn in_time(mut steps: Vec<Step>) -> Result<Vec<Rule>, String> {
    let mut names = HashMap::new();
    for (index, name) in steps.iter().enumerate().filter_map(|(i, s)| Some((i, s.name.as_ref()?))) {
        if names.insert(name.clone(), index).is_some() {
            return Err(format!("two rules have the name {name:?}"));
        }
    }
    let mut next: Vec<Option<usize>> = Vec::new();
    let mut is_next = vec![false; steps.len()];
    for step in &steps {
        let Some(name) = &step.then else {
            next.push(None);
            continue;
        };
        let Some(&to) = names.get(name) else {
            return Err(format!("then = {name:?}: no rule has that name"));
        };
        if step.rule.lasts.is_none() {
            return Err(format!(
                "then = {name:?}: the rule before it has no `for`, and never ends"
            ));
        }
        if std::mem::replace(&mut is_next[to], true) || steps[to].has_time {
            return Err(format!("the rule {name:?} begins twice: at one time, or after one rule"));
        }
        next.push(Some(to));
    }
    let mut timed = vec![false; steps.len()];
    for first in (0..steps.len()).filter(|index| !is_next[*index]) {
        let mut at = Some(first);
        while let Some(here) = at {
            timed[here] = true;
            let rule = &steps[here].rule;
            let end = rule.at.saturating_add(rule.lasts.unwrap_or(Duration::ZERO));
            at = next[here];
            if let Some(there) = at {
                steps[there].rule.at = end;
            }
        }
    }
    // Each of these follows another, and none begins.
    if let Some(lost) = timed.iter().position(|timed| !timed) {
        let name = steps[lost].name.as_deref().unwrap_or("");
        return Err(format!("the rules after {name:?} lead back to it in a circle"));
    }
    Ok(steps.into_iter().map(|step| step.rule).collect())
}
