//! `docs/performance.md` takes its figures from result files, so that nobody types them.
//!
//! A block of the page begins with a comment. Its first line names result files. The other lines are the text of the
//! block, with placeholders in place of figures. Below the comment is the same text with the figures, and a line with
//! links to the files. [CONTRIBUTING.md](../../../../CONTRIBUTING.md), "Numbers", describes placeholders.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::Value;

use super::page;

const BEGIN: &str = "<!-- results: ";
const END: &str = "<!-- end of results -->";
/// Begin of the line that names the sources of a table whose figures were typed.
const TYPED: &str = "Typed from ";

#[test]
fn the_performance_page_has_the_figures_of_the_results() {
    let path = page("performance.md");
    let text = fs::read_to_string(&path).unwrap();
    let expected = render(&text);
    if std::env::var_os("SKYSAIL_WRITE_DOCS").is_some() {
        fs::write(path, expected).unwrap();
        return;
    }
    let differs = text.lines().zip(expected.lines()).find(|(page, results)| page != results);
    assert!(
        text == expected,
        "docs/performance.md differs from the results; first difference (page, results): {differs:#?}\n\
         run SKYSAIL_WRITE_DOCS=1 cargo test -p skysail --test references"
    );
}

#[test]
fn other_tables_of_the_performance_page_name_their_source() {
    let text = fs::read_to_string(page("performance.md")).unwrap();
    let (mut table, mut is_generated, mut lacking) = (None, false, Vec::new());
    for line in text.lines().chain(["## end"]) {
        if line.starts_with(BEGIN) {
            is_generated = true;
        }
        if line.starts_with(TYPED) && line.contains("](") {
            table = None;
        } else if line.starts_with('#') || line.starts_with(BEGIN) {
            lacking.extend(table.take());
        } else if line.starts_with('|') && !is_generated {
            table.get_or_insert(line);
        }
        if line == END {
            is_generated = false;
        }
    }
    assert!(lacking.is_empty(), "tables in docs/performance.md without a line {TYPED:?} below: {lacking:#?}");
}

#[test]
#[should_panic(expected = "60 samples in a turn do not support it, it needs 1000")]
fn a_percentile_of_too_few_samples_is_refused() {
    let result = serde_json::json!({
        "summary": [{"case": "tree", "metrics": {"latency_p99_us": {"median": 1.0, "min": 1.0, "max": 1.0}}}],
        "runs": [{"case": "tree", "requests": 60}, {"case": "other", "requests": 7}],
    });
    fill("{run tree latency_p99_us}", &BTreeMap::from([("run", result)]));
}

#[test]
fn placeholders_are_replaced() {
    let summary = r#"{"summary": [
        {"case": "tree/a", "metrics": {"us": {"median": 2746.0, "min": 2534.0, "max": 2843.4}}},
        {"case": "tree/b", "metrics": {"us": {"median": 1000.0, "min": 1000.0, "max": 1000.0}}},
        {"topology": "both", "peer": "a", "connections": 2, "metrics": {"us": {"median": 0.391, "min": 0.3, "max": 0.4}}},
        {"topology": "both", "peer": "a", "connections": 16, "metrics": {"us": {"median": 17.58, "min": 17.5, "max": 17.7}}}
    ], "settings": {"rounds": 5}}"#;
    let control = r#"{"connect": {"cpu_ms_each": 2.52146}, "changes": [{"change": "route", "cpu_ms": 153.06}], "turns": [
            {"proxy": "a", "changes": [{"change": "host", "ms": 20.0}]},
            {"proxy": "b", "changes": [{"change": "host", "ms": 90.0}]},
            {"proxy": "a", "changes": [{"change": "host", "ms": 30.0}]},
            {"proxy": "a", "changes": [{"change": "host", "ms": 10.0}]}]}"#;
    let sources: BTreeMap<&str, Value> = [("run", summary), ("control", control)]
        .map(|(name, text)| (name, serde_json::from_str(text).unwrap()))
        .into();
    for (placeholder, expected) in [
        ("{run tree/a us}", "2,746 (2,534–2,843)"),
        ("{run tree/a us / 1000}", "2.75 (2.53–2.84)"),
        ("{run tree/a us / tree/b}", "2.75"),
        ("{run tree/b us}", "1,000"),
        ("{run both a 2 us}", "0.39 (0.30–0.40)"),
        ("{run both a 16 us}", "17.6 (17.5–17.7)"),
        ("{run settings rounds}", "5"),
        ("a {control connect cpu_ms_each} ms, {control changes route cpu_ms}", "a 2.52 ms, 153"),
        ("{control turns a changes host ms}", "20 (10–30)"),
        ("no figures", "no figures"),
    ] {
        assert_eq!(fill(placeholder, &sources), expected);
    }
}

/// Returns the page with the figures of the results.
fn render(page: &str) -> String {
    let mut parts = page.split(BEGIN);
    let mut text = parts.next().unwrap().to_owned();
    for part in parts {
        let (comment, rest) = part.split_once("\n-->\n").unwrap();
        let (named, template) = comment.split_once('\n').unwrap();
        let (_, rest) = rest.split_once(END).unwrap_or_else(|| panic!("the block of {named} lacks {END}"));
        let named: Vec<(&str, &str)> = named.split(", ").map(|one| one.split_once(" = ").unwrap()).collect();
        let sources = named.iter().map(|(name, file)| (*name, read(file))).collect();
        let links = named.iter().map(|(_, file)| {
            let short = file.trim_start_matches("benchmarks/results/");
            format!("[{short}](../{file})")
        });
        let links: Vec<String> = links.collect();
        let filled = fill(template, &sources);
        text.push_str(&format!(
            "{BEGIN}{comment}\n-->\n\n{filled}\n\nGenerated from {}.\n\n{END}{rest}",
            links.join(", ")
        ));
    }
    text
}

fn read(file: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
    let text = fs::read(path).unwrap_or_else(|error| panic!("{file}: {error}"));
    serde_json::from_slice(&text).unwrap()
}

/// Replaces the placeholders in a text.
fn fill(template: &str, sources: &BTreeMap<&str, Value>) -> String {
    let mut parts = template.split('{');
    let mut text = parts.next().unwrap().to_owned();
    for part in parts {
        let (placeholder, rest) = part.split_once('}').unwrap();
        text.push_str(&figure(placeholder, sources));
        text.push_str(rest);
    }
    text
}

/// Returns the figure of a placeholder: `SOURCE KEY… FIGURE`, then perhaps `/` with a number, or with a key of another
/// row for the ratio of both medians.
fn figure(placeholder: &str, sources: &BTreeMap<&str, Value>) -> String {
    let (of, by) = placeholder.split_once(" / ").map_or((placeholder, None), |(of, by)| (of, Some(by)));
    let words: Vec<&str> = of.split(' ').collect();
    let [source, keys @ .., metric] = &words[..] else { panic!("{{{placeholder}}} names no figure") };
    let source =
        sources.get(source).unwrap_or_else(|| panic!("{{{placeholder}}}: no result is named {source}"));
    let find = |keys: &[&str]| {
        find(source, keys, metric)
            .unwrap_or_else(|| panic!("{{{placeholder}}}: the result has no such figure"))
    };
    let value = find(keys);
    match by.map(|by| (by, by.parse::<f64>())) {
        None => show(value),
        Some((_, Ok(unit))) => show(value.map(|one| one / unit)),
        Some((other, Err(_))) => show([value[0] / find(&[other])[0]; 3]),
    }
}

/// Returns median, minimum and maximum of a figure: of the row of the summary with these keys, else of the value at
/// the end of the path. Several elements of a list with a key, such as the turns of a proxy, give the median of theirs.
fn find(result: &Value, keys: &[&str], metric: &str) -> Option<[f64; 3]> {
    let rows = result["summary"].as_array().map(Vec::as_slice).unwrap_or_default();
    let rows: Vec<&Value> = rows.iter().filter(|row| keys.iter().all(|key| is_of(row, key))).collect();
    if let [row] = rows[..] {
        let (samples, least) = (samples(result, row), least_samples(metric));
        assert!(
            samples.is_none_or(|samples| samples >= least),
            "{keys:?} {metric}: {} samples in a turn do not support it, it needs {least}",
            samples.unwrap_or_default()
        );
        let spread = &row["metrics"][metric];
        return Some([spread["median"].as_f64()?, spread["min"].as_f64()?, spread["max"].as_f64()?]);
    }
    assert!(rows.is_empty() || keys.is_empty(), "several rows have the keys {keys:?}");
    let found = keys.iter().fold(vec![result], |all: Vec<&Value>, key| {
        all.into_iter().flat_map(|value| below(value, key)).collect()
    });
    let mut values: Vec<f64> =
        found.into_iter().map(|value| value[metric].as_f64()).collect::<Option<_>>()?;
    values.sort_by(f64::total_cmp);
    Some([median(&values)?, *values.first()?, *values.last()?])
}

/// Returns the number of samples in a turn of which at least 10 are beyond a percentile; 0 for another figure.
fn least_samples(metric: &str) -> u64 {
    let percentiles = [("p99_9_", 10_000), ("p99_", 1_000), ("p90_", 100), ("p50_", 20)];
    let of = |name: &str| {
        metric.strip_prefix("latency_").or(metric.strip_prefix("added_"))?.starts_with(name).then_some(())
    };
    percentiles.iter().find(|(name, _)| of(name).is_some()).map_or(0, |(_, least)| *least)
}

/// Returns the least number of requests in a turn of this row; `None` if the turns have none.
fn samples(result: &Value, row: &Value) -> Option<u64> {
    let is_same = |run: &&Value| {
        ["case", "topology", "peer", "connections", "access_log", "variant"]
            .iter()
            .all(|field| run[field] == row[field])
    };
    let runs = result["runs"].as_array()?.iter().filter(is_same);
    runs.filter_map(|run| run["requests"].as_u64().or(run["at_rate"]["calls"].as_u64())).min()
}

/// Returns whether a field of an object has this value.
fn is_of(row: &Value, key: &str) -> bool {
    row.as_object().is_some_and(|fields| {
        fields
            .values()
            .any(|field| field == key || field.as_u64().is_some_and(|number| number.to_string() == key))
    })
}

/// Returns the elements of a list with this key, or the field of an object.
fn below<'a>(value: &'a Value, key: &str) -> Vec<&'a Value> {
    match value {
        Value::Array(elements) => elements.iter().filter(|element| is_of(element, key)).collect(),
        other => other.get(key).into_iter().collect(),
    }
}

/// Returns the median of values in order.
fn median(values: &[f64]) -> Option<f64> {
    let middle = values.len() / 2;
    let above = values.get(middle)?;
    Some(if values.len() % 2 == 1 { *above } else { (values[middle - 1] + above) / 2.0 })
}

/// Returns the median with the range, all with the decimals of the median.
fn show([median, min, max]: [f64; 3]) -> String {
    let is_whole = [median, min, max].iter().all(|value| value.fract() == 0.0);
    let decimals = match median.abs() {
        _ if is_whole => 0,
        size if size < 10.0 => 2,
        size if size < 100.0 => 1,
        _ => 0,
    };
    let number = |value: f64| grouped(&format!("{value:.decimals$}"));
    let (low, high) = (number(min), number(max));
    if low == high { low } else { format!("{} ({low}–{high})", number(median)) }
}

/// Returns a number with a comma before each three digits of its whole part.
fn grouped(number: &str) -> String {
    let (whole, fraction) =
        number.split_once('.').map_or((number, None), |(whole, rest)| (whole, Some(rest)));
    let mut text = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) && !text.ends_with('-') {
            text.push(',');
        }
        text.push(digit);
    }
    fraction.into_iter().fold(text, |text, fraction| format!("{text}.{fraction}"))
}
