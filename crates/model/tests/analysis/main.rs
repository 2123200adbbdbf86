//! Each code has a file in `tests/analyze` that causes it, and a section in `docs/analysis.md`.
//!
//! Each `tests/analyze/NAME.yaml` ends with its expected findings, as comments. `UPDATE=1 cargo test -p skysail-model
//! --test analysis` writes these comments and the page; read both before you commit.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

mod complete;
mod go_tests;
mod istioctl;

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use skysail_model::{Change, Code, Diagnostic, Files, Object, Severity, World, parse_with_lines};

/// Line before the expected findings.
const EXPECTED: &str = "# Expected findings:\n";
/// Time of the analysis: 2030-01-01.
const NOW: i64 = 1_893_456_000;
/// Codes that one file cannot cause, with the reason.
const WITHOUT_EXAMPLE: &[(Code, &str)] = &[
    (Code::Unreadable, "the operating system refuses to read the file"),
    (Code::LastVersionKept, "the control plane knows a valid version from before"),
    (Code::TooManyErrors, "it takes 1,000 errors or 10,000 objects"),
    (Code::ComparisonLimit, "it takes 2,000,000 pairs of objects"),
    (Code::AddresslessConflict, "`skysail analyze` gives each Service an address, as a cluster does"),
    (Code::CannotRun, "only `skysail up` runs workloads"),
    (Code::NotRun, "only `skysail up` runs workloads"),
];

/// Codes of `istioctl analyze` without a counterpart, with the reason.
const WITHOUT_COUNTERPART: &[(&str, &str)] = &[
    ("IST0102", "`skysail up` injects every pod unless a label disables it"),
    ("IST0103", "`skysail up` starts the sidecar beside each pod"),
    ("IST0126", "clusters of other control planes are unknown, so any `fromRegistry` may be one of them"),
    ("IST0136", "the status of Istio's annotations; its analyzer is not among those that istioctl runs"),
    ("IST0139", "there is no webhook"),
    ("IST0141", "there is nothing to install in a cluster"),
    ("IST0142", "the version of Kubernetes makes no difference"),
    ("IST0143", "files do not say at which address a program listens"),
    ("IST0148", "injection is enabled by default"),
    ("IST0156", "all objects of Gateway API are read, whatever version a cluster has"),
    ("IST0158", "the sidecar is no image"),
    ("IST0163", "there is no webhook"),
    ("IST0164", "there is no webhook"),
    ("IST0166", "selectors apply to the proxies of a Gateway of Gateway API too"),
    ("IST0167", "the finding concerns waypoints, which do not exist here"),
    ("IST0168", "the finding concerns upgrades of Istio"),
    ("IST0169", "the finding concerns upgrades of Istio"),
    ("IST0170", "one control plane reads one cluster"),
    ("IST0171", "conditions in `status` are not read; `skysail` shows its own"),
    ("IST0172", "all objects of Gateway API are read, whatever version a cluster has"),
    ("IST0175", "the control plane's own settings limit the addresses from which it fetches keys"),
    ("IST0176", "all objects of Gateway API are read, whatever version a cluster has"),
];
/// Codes below IST0177 that Istio has removed or never used. Its codes are in `pkg/config/analysis/msg/messages.yaml`.
const UNUSED_BY_ISTIO: &[u32] = &[104, 105, 113, 114, 115, 117, 119, 120, 121, 122, 124];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the YAML files of a folder and of the folders in it.
fn yaml_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            found.extend(yaml_files(&entry));
        } else if entry.extension().is_some_and(|end| end == "yaml") {
            found.push(entry);
        }
    }
    found.sort();
    found
}

/// Analyzes texts, named by their files, as `skysail analyze` does.
fn analyze(texts: &[(String, String)]) -> Vec<Diagnostic> {
    analyze_at(NOW, texts)
}

/// Analyzes texts at a time, in seconds since 1970.
fn analyze_at(now: i64, texts: &[(String, String)]) -> Vec<Diagnostic> {
    let (mut world, mut files) = (World::new(), Files::new());
    // As a cluster does, gives Services without an address one of their own.
    let mut last = 0;
    for (name, text) in texts {
        for mut change in files.take(0, name, parse_with_lines(text, name)) {
            if let Change::Apply(Object::Service(service), _) = &mut change
                && service.spec.cluster_ips.is_empty()
                && service.spec.external_name.is_none()
            {
                last += 1;
                let service = std::sync::Arc::make_mut(service);
                service.spec.cluster_ips = vec![std::net::Ipv4Addr::new(10, 97, 0, last).into()];
            }
            change.apply_to(&mut world);
        }
    }
    world.analyze(files.diagnostics(), now)
}

/// Returns the lines that state the findings of a file.
fn expected(findings: &[Diagnostic]) -> String {
    let mut lines = String::new();
    for Diagnostic { code, severity, object, line, field, .. } in findings {
        let field = if field.is_empty() { String::new() } else { format!(" {field}") };
        writeln!(lines, "# {code} {severity} line {line}: {object}{field}").unwrap();
    }
    lines
}

struct Example {
    name: String,
    text: String,
    findings: Vec<Diagnostic>,
}

/// Reads the corpus, compares each file with its expected findings, or writes them.
fn corpus() -> Vec<Example> {
    let mut wrong = Vec::new();
    let mut examples = Vec::new();
    for path in yaml_files(&root().join("tests/analyze")) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let whole = fs::read_to_string(&path).unwrap();
        let (text, stated) = whole.split_once(EXPECTED).unwrap_or((&whole, ""));
        let findings = analyze(&[(name.clone(), whole.clone())]);
        let found = expected(&findings);
        if env::var_os("UPDATE").is_some() {
            fs::write(&path, format!("{text}{EXPECTED}{found}")).unwrap();
        } else if found != stated {
            wrong.push(format!("--- {name}: expected\n{stated}--- found\n{found}"));
        }
        if findings.is_empty() {
            wrong.push(format!("--- {name}: no finding"));
        }
        examples.push(Example { name, text: text.to_owned(), findings });
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    examples
}

/// Returns the name of the file that is the example of a code: `UnknownHost` has `unknown-host.yaml`.
fn file_of(code: Code) -> String {
    let mut name = String::new();
    for (index, letter) in code.name().char_indices() {
        if letter.is_ascii_uppercase() && index > 0 {
            name.push('-');
        }
        name.push(letter.to_ascii_lowercase());
    }
    format!("{name}.yaml")
}

#[test]
fn every_code_has_its_file_and_its_section() {
    let examples = corpus();
    assert!(examples.len() >= 100, "{} mistakes", examples.len());
    let by_name: BTreeMap<&str, &Example> = examples.iter().map(|one| (one.name.as_str(), one)).collect();
    let mut missing = Vec::new();
    for code in Code::ALL {
        let has = by_name
            .get(file_of(*code).as_str())
            .is_some_and(|one| one.findings.iter().any(|found| found.code == *code));
        if has == WITHOUT_EXAMPLE.iter().any(|(known, _)| known == code) {
            missing.push(format!("{code} {}", file_of(*code)));
        }
    }
    assert!(missing.is_empty(), "codes without a file that causes them: {missing:#?}");
    let page = page(&by_name);
    let path = root().join("docs/analysis.md");
    if env::var_os("UPDATE").is_some() {
        fs::write(path, page).unwrap();
    } else {
        assert!(fs::read_to_string(path).unwrap() == page, "docs/analysis.md is stale: run with UPDATE=1");
    }
}

/// Each analyzer of istioctl has a counterpart, or there is a reason why it has none.
#[test]
fn codes_of_istioctl_have_counterparts() {
    let known: BTreeSet<&str> = Code::ALL.iter().flat_map(|code| code.istio()).copied().collect();
    let mut wrong = Vec::new();
    for number in (101..=177).filter(|number| !UNUSED_BY_ISTIO.contains(number)) {
        let name = format!("IST{number:04}");
        let is_listed = WITHOUT_COUNTERPART.iter().any(|(without, _)| *without == name);
        if known.contains(name.as_str()) == is_listed {
            wrong.push(name);
        }
    }
    assert!(wrong.is_empty(), "neither found nor listed, or both: {wrong:?}");
}

/// Each code is reported somewhere in the sources.
#[test]
fn every_code_is_used() {
    let mut sources = String::new();
    let mut folders =
        ["model/src", "sandbox/src", "control/src"].map(|of| root().join("crates").join(of)).to_vec();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                folders.push(entry);
            } else if !entry.ends_with("analysis/codes.rs") {
                sources.push_str(&fs::read_to_string(entry).unwrap_or_default());
            }
        }
    }
    let words: BTreeSet<&str> = sources
        .split("Code::")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next())
        .collect();
    let unused: Vec<&str> =
        Code::ALL.iter().map(|code| code.name()).filter(|name| !words.contains(name)).collect();
    assert_eq!(unused, [""; 0]);
}

/// Returns the folders that the first command of an example's page runs, or the folder itself without a page.
fn folders_of(folder: &Path) -> Vec<PathBuf> {
    let page = fs::read_to_string(folder.join("README.md")).unwrap_or_default();
    let command = page.lines().find_map(|line| line.trim().strip_prefix("$ skysail up "));
    let Some(command) = command else { return vec![folder.to_owned()] };
    // Folders are relative to the root, or to the page where it begins with `cd`.
    let below =
        |word: &str| if word.starts_with("examples/") { root().join(word) } else { folder.join(word) };
    command.split(' ').map(below).collect()
}

#[test]
fn the_examples_have_no_findings() {
    let files = yaml_files(&root().join("examples"));
    let folders: BTreeSet<PathBuf> = files.iter().map(|path| path.parent().unwrap().to_owned()).collect();
    assert!(!folders.is_empty());
    for folder in folders {
        let files = folders_of(&folder).into_iter().flat_map(|folder| yaml_files(&folder));
        let texts: Vec<(String, String)> =
            files.map(|path| (path.display().to_string(), fs::read_to_string(&path).unwrap())).collect();
        let findings: Vec<String> = analyze(&texts)
            .iter()
            .filter(|finding| finding.severity != Severity::Info)
            .map(ToString::to_string)
            .collect();
        assert_eq!(findings, [""; 0]);
    }
}

/// Correct objects that had a finding once.
const CORRECT: &str = "
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: a}
spec:
  ingressClassName: istio
  rules: [{host: a.example.com, http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}}]}}]
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: b}
spec:
  ingressClassName: istio
  rules: [{host: b.example.com, http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}}]}}]
---
apiVersion: networking.k8s.io/v1
kind: IngressClass
metadata: {name: istio}
spec: {controller: istio.io/ingress-controller}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec: {containers: [{name: web, image: web, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: istio-ingressgateway, namespace: istio-system}
spec:
  selector: {istio: ingressgateway}
  ports: [{name: http2, port: 80, targetPort: 8080}, {name: https, port: 443, targetPort: 8443}]
---
apiVersion: v1
kind: Pod
metadata: {name: edge, namespace: istio-system, labels: {istio: ingressgateway}}
spec: {containers: [{name: istio-proxy, image: auto, ports: [{containerPort: 8080}, {containerPort: 8443}]}]}
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: edge, namespace: istio-system}
spec:
  selector: {istio: ingressgateway}
  servers: [{port: {number: 80, name: http, protocol: HTTP}, hosts: [c.example.com]}]
---
apiVersion: security.istio.io/v1
kind: RequestAuthentication
metadata: {name: edge, namespace: istio-system}
spec:
  selector: {matchLabels: {istio: ingressgateway}}
  jwtRules: [{issuer: a.example.com, jwksUri: 'https://a.example.com/keys'}]
";

#[test]
fn correct_objects_have_no_findings() {
    let findings = analyze(&[("correct.yaml".to_owned(), CORRECT.to_owned())]);
    let found = findings.iter().filter(|finding| finding.severity != Severity::Info);
    // No policy demands a token.
    let found = found.filter(|finding| finding.code != Code::NoTokens);
    assert_eq!(found.map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
}

/// Findings about a host agree with the VirtualService that takes effect in each namespace.
#[test]
fn shared_hosts_are_reported_where_they_have_no_effect() {
    let rule = |namespace: &str, name: &str, year: u32, export_to: &str| {
        format!(
            "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\n\
             metadata: {{name: {name}, namespace: {namespace}, creationTimestamp: '{year}-01-01T00:00:00Z'}}\n\
             spec: {{hosts: [a.example.com], exportTo: [{export_to}], http: [{{directResponse: {{status: 200}}}}]}}\n"
        )
    };
    let found = |rules: &[String]| -> Vec<String> {
        let findings = analyze(&[("rules.yaml".to_owned(), rules.concat())]);
        let shared = findings.iter().filter(|one| matches!(one.code, Code::SharedHost | Code::HostConflict));
        shared.map(|one| format!("{} {}: {}", one.code.id(), one.object, one.message)).collect()
    };
    let older = rule("svc", "named", 2020, "client");
    let own = rule("client", "own", 2024, "'.'");
    assert_eq!(
        found(&[older, own.clone()]),
        [
            "SKY0727 VirtualService svc/named: in namespace client, VirtualService client/own takes precedence for \
             a.example.com",
            "SKY0727 VirtualService client/own: VirtualService svc/named has a.example.com too, and has no effect on it in \
             namespace client",
        ]
    );
    // Each namespace has its own.
    assert_eq!(found(&[own, rule("svc", "other", 2020, "'.'")]), [""; 0]);
    let conflict = found(&[rule("client", "first", 2020, "'*'"), rule("svc", "second", 2024, "'*'")]);
    let codes: Vec<&str> = conflict.iter().map(|one| &one[..7]).collect();
    assert_eq!(codes, ["SKY0727", "SKY0701"], "{conflict:?}");
}

/// Objects beyond the maximum number of pairs are compared with none; a finding says so, once for each analysis.
#[test]
fn comparisons_beyond_the_limit_are_reported() {
    const MANY: usize = 1_500;
    let object = |api: &str, kind: &str, namespace: usize, number: usize, spec: &str| {
        format!(
            "---\napiVersion: {api}\nkind: {kind}\nmetadata: {{name: a{number}, namespace: n{namespace}, labels: \
             {{app: a{number}}}}}\nspec: {spec}\n"
        )
    };
    let found = |made: &dyn Fn(usize) -> String| -> Vec<String> {
        let text: String = (0..MANY).map(made).collect();
        let findings = analyze(&[("many.yaml".to_owned(), text)]);
        let found = findings.iter().filter(|one| one.code == Code::ComparisonLimit);
        found.map(|one| one.message.split(" is not").next().unwrap().to_owned()).collect()
    };
    let networking = "networking.istio.io/v1";
    let gateways = found(&|number| {
        let spec = format!(
            "{{selector: {{app: a{number}}}, servers: [{{port: {{number: 443, name: https, protocol: HTTPS}}, hosts: \
             [a.b], tls: {{mode: SIMPLE, credentialName: same}}}}]}}"
        );
        object(networking, "Gateway", number, number, &spec)
    });
    assert_eq!(gateways, ["SKY0717", "SKY0718"]);
    let rules = found(&|number| {
        let spec = "{hosts: [a.example.com], exportTo: ['.'], http: [{directResponse: {status: 200}}]}";
        object(networking, "VirtualService", number, number, spec)
    });
    assert_eq!(rules, ["SKY0701 or SKY0727"]);
    let sidecars = found(&|number| {
        let selector =
            format!("{{workloadSelector: {{labels: {{app: a{number}}}}}, egress: [{{hosts: ['*/*']}}]}}");
        let pod = object("v1", "Pod", 0, number, "{containers: [{name: a, image: a}]}");
        object(networking, "Sidecar", 0, number, &selector) + &pod
    });
    assert_eq!(sidecars, ["SKY0713"]);
}

#[test]
fn an_annotation_suppresses_findings_about_its_object() {
    let rule = |codes: &str| {
        let text = format!(
            "apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata:\n  name: a\n  annotations: \
             {{galley.istio.io/analyze-suppress: \"{codes}\"}}\nspec:\n  selector: {{istio: edge}}\n  servers:\n  - \
             port: {{number: 80, name: http, protocol: HTTP}}\n    hosts: [a.b]\n---\napiVersion: v1\nkind: Pod\n\
             metadata: {{name: p}}\nspec: {{containers: [{{name: a, image: a}}]}}\n"
        );
        analyze(&[("a.yaml".to_owned(), text)]).len()
    };
    assert_eq!(
        [rule(""), rule("SKY0601"), rule("SKY0601, SKY0613"), rule("IST0127"), rule("*")],
        [1, 1, 0, 0, 0]
    );
}

/// Returns the page of all codes.
fn page(examples: &BTreeMap<&str, &Example>) -> String {
    let mut page = String::from(include_str!("head.md"));
    let areas: &[(&str, &str)] = &[
        ("SKY00", "Texts and objects"),
        ("SKY01", "Values of fields"),
        ("SKY02", "Routing"),
        ("SKY03", "Gateways, external services and proxies"),
        ("SKY04", "Security"),
        ("SKY05", "Kubernetes objects and injection"),
        ("SKY06", "References between objects"),
        ("SKY07", "Conflicts between objects"),
        ("SKY08", "Support"),
        ("SKY09", "Workloads of `skysail up`"),
    ];
    for (prefix, title) in areas {
        writeln!(page, "\n## {title}").unwrap();
        for code in Code::ALL.iter().filter(|code| code.id().starts_with(prefix)) {
            section(&mut page, *code, examples);
        }
    }
    counterparts(&mut page);
    page
}

/// Writes which codes stand for those of istioctl.
fn counterparts(page: &mut String) {
    let mut by_istio: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for code in Code::ALL {
        code.istio().iter().for_each(|of| by_istio.entry(of).or_default().push(code.id()));
    }
    let found = by_istio.iter().map(|(of, codes)| match codes.len() {
        0..=8 => (*of, codes.join(", ")),
        count => (*of, format!("{count} codes, such as {}", codes[..3].join(", "))),
    });
    let without = WITHOUT_COUNTERPART.iter().map(|(of, reason)| (*of, format!("none: {reason}")));
    let rows: BTreeMap<&str, String> = found.chain(without).collect();
    page.push_str("\n## Codes of istioctl\n\n| istioctl | Skysail |\n|---|---|\n");
    rows.iter().for_each(|(of, text)| writeln!(page, "| {of} | {text} |").unwrap());
}

fn section(page: &mut String, code: Code, examples: &BTreeMap<&str, &Example>) {
    writeln!(page, "\n### {code} {}\n\n{}\n", code.name(), code.meaning()).unwrap();
    let istio =
        if code.istio().is_empty() { String::new() } else { format!(", {}", code.istio().join(", ")) };
    writeln!(page, "Severity: {}{istio}. Fix: {}", code.severity(), code.fix()).unwrap();
    if let Some((_, reason)) = WITHOUT_EXAMPLE.iter().find(|(known, _)| *known == code) {
        writeln!(page, "\nNo file alone causes it: {reason}.").unwrap();
        return;
    }
    let example = examples[file_of(code).as_str()];
    let finding = example.findings.iter().find(|found| found.code == code).unwrap();
    writeln!(page, "\n```yaml\n{}```\n", excerpt(&example.text, finding.line)).unwrap();
    let Diagnostic { object, field, message, remedy, .. } = finding;
    let about: String =
        [object, field].into_iter().filter(|part| !part.is_empty()).map(|part| format!("{part}: ")).collect();
    let remedy = if remedy.is_empty() { String::new() } else { format!("; {remedy}") };
    writeln!(page, "> {about}{message}{remedy}").unwrap();
}

/// Returns the document with a line. Long lines and documents are cut.
fn excerpt(text: &str, line: u32) -> String {
    let mut document = Vec::new();
    for (index, content) in text.lines().enumerate() {
        if content == "---" {
            if index >= usize::try_from(line).unwrap() {
                break;
            }
            document.clear();
        } else {
            let cut: String = content.chars().take(110).collect();
            document.push(if cut.len() < content.len() { format!("{cut}…") } else { cut });
        }
    }
    if document.len() > 22 {
        document.truncate(20);
        document.push("…".to_owned());
    }
    document.iter().map(|line| format!("{line}\n")).collect()
}
