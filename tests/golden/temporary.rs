use std::panic;
#[path = "../../fuzz/src/compile.rs"]
mod target;

#[test]
fn fuzz_compile() {
    let folder = crate::root().join("fuzz/seeds/compile");
    let mut seeds: Vec<Vec<u8>> =
        std::fs::read_dir(folder).unwrap().map(|e| std::fs::read(e.unwrap().path()).unwrap()).collect();
    seeds.sort();
    // Objects of all files, each a document.
    let mut documents: Vec<String> = Vec::new();
    for seed in &seeds {
        documents.extend(String::from_utf8(seed.clone()).unwrap().split("\n---\n").map(str::to_owned));
    }
    for file in [
        "tests/analyze",
        "tests/mistakes",
        "tests/istiod/q-serviceentry-kinds",
        "tests/istiod/x-dr-kinds",
        "tests/istiod/z-gatewayapi-kinds",
        "tests/istiod/p-gateway-tls",
        "tests/istiod/w-sidecar-kinds",
        "tests/istiod/t-telemetry-kinds",
        "tests/istiod/u-authz-kinds",
        "tests/istiod/o-virtualservice-features",
        "tests/istiod/n-destinationrule-policies",
        "tests/istiod/r-vs-tls-tcp",
        "tests/istiod/v-jwt-kinds",
        "tests/istiod/g-serviceentry",
    ] {
        for entry in std::fs::read_dir(crate::root().join(file)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "yaml") {
                if let Ok(text) = std::fs::read_to_string(&path) {
                    if text.len() < 20000 {
                        documents.extend(text.split("\n---\n").map(str::to_owned));
                    }
                }
            }
        }
    }
    let mut failures: std::collections::BTreeMap<String, (usize, String)> = Default::default();
    let mut run = |text: &str| {
        let outcome = panic::catch_unwind(|| target::compile(text.as_bytes()));
        if let Err(error) = outcome {
            let said = error
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| error.downcast_ref::<&str>().map(|s| s.to_string()))
                .unwrap_or_default();
            let key: String = said.chars().filter(|c| !c.is_ascii_digit()).take(160).collect();
            let entry = failures.entry(key).or_insert((0, format!("{said}\n----\n{text}")));
            entry.0 += 1;
        }
    };
    panic::set_hook(Box::new(|_| {}));
    for seed in &seeds {
        run(&String::from_utf8_lossy(seed));
    }
    let mut dice = fastrand::Rng::with_seed(std::env::var("FUZZ_SEED").map_or(1, |s| s.parse().unwrap()));
    let rounds: usize = std::env::var("FUZZ_ROUNDS").map_or(2000, |s| s.parse().unwrap());
    let words = [
        "0",
        "-1",
        "''",
        "'*'",
        "a",
        "a.example",
        "10.0.0.1",
        "80",
        "443",
        "65536",
        "STRICT",
        "SIMPLE",
        "DNS",
        "NONE",
        "1s",
        "0s",
        "{}",
        "[]",
        "x",
        "default",
        "é",
        "1.5",
        "*.a",
        "true",
    ];
    for _ in 0..rounds {
        let count = dice.usize(1..5);
        let mut text = (0..count)
            .map(|_| documents[dice.usize(..documents.len())].clone())
            .collect::<Vec<_>>()
            .join("\n---\n");
        // replace random scalar tokens, to stay valid YAML often
        for _ in 0..dice.usize(0..4) {
            let ends: Vec<usize> = text
                .match_indices(|c| c == ':' || c == ',' || c == '[')
                .map(|(i, _)| i + 1)
                .filter(|i| text.is_char_boundary(*i))
                .collect();
            if ends.is_empty() {
                break;
            }
            let at = ends[dice.usize(..ends.len())];
            let rest = &text[at..];
            let len = rest.find(|c| matches!(c, ',' | '}' | ']' | '\n')).unwrap_or(rest.len());
            let word = if dice.bool() {
                words[dice.usize(..words.len())].to_owned()
            } else {
                let other = &documents[dice.usize(..documents.len())];
                let ends: Vec<usize> = other.match_indices(": ").map(|(i, _)| i + 2).collect();
                if ends.is_empty() {
                    continue;
                }
                let from = &other[ends[dice.usize(..ends.len())]..];
                from[..from.find(|c| matches!(c, ',' | '}' | ']' | '\n')).unwrap_or(from.len())].to_owned()
            };
            text.replace_range(at..at + len, &format!(" {word}"));
        }
        run(&text);
    }
    for (count, shown) in failures.values() {
        println!("==== {count} times: {shown}\n");
    }
    println!("{} kinds of failures", failures.len());
}
