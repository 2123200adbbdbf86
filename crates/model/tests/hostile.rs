//! Large hostile texts are refused within bounds of memory and of findings.
//!
//! One test, because it reads the peak memory of its process. `HOSTILE=NAME` selects one text and `HOSTILE_MB=30` sets
//! the size of each, for measurements.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{env, fs, time::Instant};

use skysail_model::{Files, Severity, World, parse_with_lines};

/// Size of each text, in MB, unless `HOSTILE_MB` says otherwise.
const SIZE: usize = 10;
/// Bound of the peak memory, in MB.
const MAX_MEMORY: usize = 200;
/// Bound of the number of findings of one text.
const MAX_FINDINGS: usize = 12_000;
/// Bound of the number of objects of one text.
const MAX_OBJECTS: usize = 10_000;

/// Returns the size of each text in bytes.
fn size() -> usize {
    env::var("HOSTILE_MB").map_or(SIZE, |size| size.parse().unwrap()) << 20
}

/// Repeats a text up to a size.
fn fill(head: &str, part: &str, tail: &str) -> String {
    let size = size();
    let mut text = String::with_capacity(size + 1024);
    text.push_str(head);
    while text.len() + part.len() + tail.len() < size {
        text.push_str(part);
    }
    text.push_str(tail);
    text
}

/// Repeats a text with a number in it.
fn numbered(head: &str, part: impl Fn(usize) -> String) -> String {
    let (mut text, size) = (String::from(head), size());
    for index in 0.. {
        text.push_str(&part(index));
        if text.len() >= size {
            break;
        }
    }
    text
}

const RULE: &str = "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: a}\nspec:\n";
const GATEWAY: &str =
    "apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {name: a}\nspec:\n  servers:\n";
const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec:\n  ports:\n";
const MAP: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata:\n";

/// Returns a small Service without its braces.
fn service(index: usize) -> String {
    format!("apiVersion: v1, kind: Service, metadata: {{name: s{index}}}, spec: {{ports: [{{port: 80}}]}}")
}
/// Returns a VirtualService for a host, with 200 routes to hosts that do not exist.
fn rule_of(host: &str, index: usize) -> String {
    let mut text = format!(
        "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: a{index}}}\nspec:\n  \
         hosts: [{host}]\n  http:\n"
    );
    for route in 0..200 {
        text.push_str(&format!(
            "  - {{match: [{{uri: {{exact: /{route}}}}}], route: [{{destination: {{host: b{index}x{route}}}}}]}}\n"
        ));
    }
    text
}

fn aliases() -> String {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..60 {
        let before = format!("*a{}, ", level - 1).repeat(9);
        text.push_str(&format!("a{level}: &a{level} [{before}*a{}]\n", level - 1));
    }
    fill(&text, "# padding of the text\n", "")
}

type Text = (&'static str, fn() -> String);

const TEXTS: &[Text] = &[
    ("flow nesting", || fill("a: ", "[", "")),
    ("mapping nesting", || fill("", "{a: ", "")),
    ("block nesting", || fill("", "- ", "a\n")),
    ("aliases", aliases),
    ("one alias often", || fill("a: &a [x, x, x, x, x, x, x, x]\nb:\n", "- *a\n", "")),
    ("values", || fill(&format!("{RULE}  hosts:\n"), "  - a\n", "")),
    ("empty values", || fill(&format!("{RULE}  hosts: ["), ",", "]\n")),
    ("wrong values", || fill(&format!("{RULE}  http:\n"), "  - 1\n", "")),
    ("numbers", || fill(&format!("{RULE}  hosts: [1"), "9", "]\n")),
    ("many numbers", || fill(&format!("{RULE}  hosts: ["), "1e999999999, ", "1]\n")),
    ("documents", || fill("", "---\na\n", "")),
    ("objects", || {
        numbered("", |i| format!("---\napiVersion: v1\nkind: Servcie\nmetadata: {{name: a{i}}}\n"))
    }),
    ("foreign kinds", || {
        numbered("", |i| format!("---\napiVersion: a.b/v1\nkind: K{i}\nmetadata: {{name: a}}\n"))
    }),
    ("broken documents", || fill("", "---\n[\n", "")),
    ("broken documents with comments", || fill("", &format!("---\n[\n{}", "# a comment\n".repeat(100)), "")),
    ("documents that end with dots", || fill("", "a: 1\n...\n", "")),
    ("Services", || numbered("", |i| format!("---\n{{{}}}\n", service(i)))),
    ("Services of a list", || {
        numbered("apiVersion: v1\nkind: List\nitems:\n", |i| format!("- {{{}}}\n", service(i)))
    }),
    ("Services of many lists", || {
        let items = |list| (0..1_000).map(move |i| format!("- {{{}}}\n", service(1_000 * list + i)));
        numbered("", |list| {
            format!("---\napiVersion: v1\nkind: List\nitems:\n{}", items(list).collect::<String>())
        })
    }),
    ("Services with warnings", || {
        numbered("", |i| {
            let unknown = (0..100).map(|field| format!(", unknown{field}: 1"));
            format!("---\n{{{}{}}}\n", service(i), unknown.collect::<String>())
        })
    }),
    ("empty documents", || fill("", "---\n", "")),
    ("a long line", || fill(&format!("{MAP}  a: \""), "a", "\"\n")),
    ("a long key", || fill(MAP, "a", ": b\n")),
    ("keys", || numbered(MAP, |i| format!("  k{i}: a\n"))),
    ("keys of many mappings", || {
        numbered(
            MAP,
            |i| {
                if i % 9_000 == 0 { format!("  m{}:\n", i / 9_000) } else { format!("    k{i}: a\n") }
            },
        )
    }),
    ("duplicate keys", || fill(MAP, "  a: b\n", "")),
    ("unknown fields", || numbered(RULE, |i| format!("  f{i}: 1\n"))),
    ("comments", || fill("", "# a comment\n", "")),
    ("spaces", || fill("a:", " ", "b\n")),
    ("block scalar", || fill(&format!("{MAP}  a: |\n"), "    text\n", "")),
    ("anchors", || numbered("", |i| format!("- &a{i} x\n"))),
    ("merge keys", || fill("a: &a {b: c}\nd:\n", "- {<<: *a}\n", "")),
    // Kubernetes refuses objects of more than 1.5 MB.
    ("servers of a Gateway", || {
        fill(GATEWAY, "  - {port: {number: 1, name: a, protocol: HTTP}, hosts: [a]}\n", "")
    }),
    ("ports of a Service", || fill(SERVICE, "  - {port: 1, name: a}\n", "")),
    ("items of no list", || fill("kind: Gateway\nitems:\n", "- {a: {b: 1, c: d}, e: [f]}\n", "")),
    // Valid objects take memory in proportion, so these texts have 2 MB.
    ("routes to unknown hosts", || (0..130).map(|i| rule_of(&format!("a{i}"), i)).collect()),
    ("rules of one host", || (0..130).map(|i| rule_of("a", i)).collect()),
    ("control characters", || fill("a: \"", "\u{1}", "\"\n")),
];

/// What the refusal of a text says.
const REFUSALS: &[(&str, &str)] = &[
    ("servers of a Gateway", "more than 1572864 bytes"),
    ("ports of a Service", "more than 1572864 bytes"),
    ("broken documents with comments", "more than 1000 errors"),
    ("documents", "more than 10000 objects"),
    ("objects", "more than 10000 objects"),
    ("Services", "more than 10000 objects"),
    ("Services of a list", "a list has more than 10000 objects"),
    ("Services of many lists", "more than 10000 objects"),
];

/// Returns the peak memory of this process in MB.
fn peak() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() / 1024
}

#[test]
fn hostile_texts_are_refused_within_bounds() {
    let is_text = |name: &str| TEXTS.iter().any(|(of, _)| *of == name);
    let unused: Vec<_> = REFUSALS.iter().filter(|(name, _)| !is_text(name)).collect();
    assert!(unused.is_empty(), "no text has these names: {unused:?}");
    let wanted = env::var("HOSTILE").ok();
    for (name, make) in TEXTS {
        if wanted.as_ref().is_some_and(|wanted| wanted != name) {
            continue;
        }
        let text = make();
        let start = Instant::now();
        let (mut world, mut files) = (World::new(), Files::new());
        let parsed = parse_with_lines(&text, "a.yaml");
        let objects = parsed.objects.len();
        for change in files.take(0, "a.yaml", parsed) {
            change.apply_to(&mut world);
        }
        let findings = world.analyze(files.diagnostics(), 0);
        let errors = findings.iter().filter(|finding| finding.severity == Severity::Error).count();
        println!(
            "{name}: {} MB, {} findings, {errors} errors, peak {} MB, {:?}",
            text.len() >> 20,
            findings.len(),
            peak(),
            start.elapsed()
        );
        assert!(findings.len() <= MAX_FINDINGS, "{name}: {} findings", findings.len());
        assert!(objects <= MAX_OBJECTS, "{name}: {objects} objects");
        if let Some((_, refusal)) = REFUSALS.iter().find(|(of, _)| of == name) {
            assert!(
                findings.iter().any(|found| found.to_string().contains(refusal)),
                "{name}: {}",
                findings[0]
            );
            assert_eq!(objects, 0, "{name}");
        }
        let longest = findings.iter().map(|finding| finding.to_string().len()).max().unwrap_or(0);
        assert!(longest < 4_096, "{name}: a finding has {longest} bytes");
    }
    assert!(peak() <= MAX_MEMORY, "peak memory: {} MB", peak());
}
