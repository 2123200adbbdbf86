//! A [`Validator`] that saw every change reports byte for byte what a new one reports, whatever changed. It fails if a
//! check reads something that it does not record.
//!
//! The files of `tests/mistakes` and `tests/analyze` come, change and go in random order. Some of their words are
//! exchanged, so that objects of different files meet. `SKYSAIL_SEEDS=N` sets the number of sequences.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{collections::BTreeSet, env, fs, path::Path};

use skysail_model::{Code, Files, Severity, Validator, World, parse};

/// Number of sequences without `SKYSAIL_SEEDS`.
const SEEDS: u64 = 40;
/// Number of changes of a sequence.
const STEPS: usize = 60;
/// Number of files that the changes of a sequence concern.
const FOCUS: usize = 30;

/// Returns the texts of all files.
fn corpus() -> Vec<String> {
    let folders = ["../../tests/mistakes", "../../tests/analyze"];
    let folders = folders.map(|folder| Path::new(env!("CARGO_MANIFEST_DIR")).join(folder));
    let mut paths: Vec<_> = folders
        .iter()
        .flat_map(|folder| fs::read_dir(folder).unwrap())
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == "yaml"));
    paths.sort();
    paths.into_iter().filter_map(|path| fs::read_to_string(path).ok()).collect()
}

/// Returns the names and other short values of a text.
fn words(text: &str) -> Vec<&str> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '/' | '*');
    text.split(|c| !is_word(c)).filter(|word| word.len() > 1 && !word.contains("--")).collect()
}

/// Returns some documents of a text, in most cases all. Sometimes a word is replaced by one of another text, or all lines
/// move.
fn variant(text: &str, other: &str, random: &mut fastrand::Rng) -> String {
    let documents: Vec<&str> = text.split("\n---").filter(|_| random.u8(..5) > 0).collect();
    let mut made = documents.join("\n---");
    let (own, others) = (words(text), words(other));
    if random.bool()
        && let (Some(from), Some(to)) = (random.choice(own), random.choice(others))
    {
        made = made.replace(from, to);
    }
    if random.u8(..8) == 0 { format!("# A comment.\n{made}") } else { made }
}

#[test]
fn kept_findings_are_those_of_a_new_validation() {
    let corpus = corpus();
    let seeds = env::var("SKYSAIL_SEEDS").map_or(SEEDS, |text| text.parse().unwrap());
    let mut codes: BTreeSet<Code> = BTreeSet::new();
    for seed in 0..seeds {
        let mut random = fastrand::Rng::with_seed(seed);
        let focus = random.choose_multiple(&corpus, FOCUS);
        let (mut world, mut files, mut validator) = (World::new(), Files::new(), Validator::default());
        for step in 0..STEPS {
            for _ in 0..=random.usize(..3) {
                let file = random.usize(..FOCUS);
                let path = format!("{file}.yaml");
                let text = variant(focus[file], focus[random.usize(..FOCUS)], &mut random);
                let changes =
                    if random.u8(..4) == 0 { files.remove(0, &path) } else { files.set(0, &path, &text) };
                changes.into_iter().for_each(|change| _ = change.apply_to(&mut world));
            }
            if random.bool() {
                world.take_changes();
            }
            let kept = validator.validate(&world);
            assert_eq!(kept, world.validate(), "seed {seed}, step {step}");
            codes.extend(kept.iter().map(|finding| finding.code));
        }
    }
    assert!(codes.len() >= 30, "only {} codes are reported: {codes:?}", codes.len());
}

#[test]
fn old_names_of_fields_are_read() {
    let text = "\
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: a, namespace: b}
spec: {hosts: [a], http: [{mirror: {host: x}, mirror_percent: 10, route: [{destination: {host: a}}]}]}
---
apiVersion: security.istio.io/v1
kind: RequestAuthentication
metadata: {name: a, namespace: b}
spec: {jwtRules: [{issuer: a, jwks_uri: 'https://a.example/x'}]}
";
    let parsed = parse(text, "old.yaml");
    let errors = parsed.diagnostics.iter().filter(|found| found.severity == Severity::Error);
    assert_eq!(errors.map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
    assert_eq!(parsed.objects.len(), 2);
}
