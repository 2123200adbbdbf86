//! Input of `skysail up`: rules without workloads, standard input, and folders of other tools.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Command, Output, Stdio},
};

use nix::pty::openpty;
use serde_json::Value;
use skysail_testkit::{Setup, eventually};
use tempfile::TempDir;

const RULES: &str = "\
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: web, namespace: shop}
spec:
  hosts: [web]
  http:
  - route:
    - destination: {host: web, subset: v1}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: web, namespace: shop}
spec:
  host: web
  subsets: [{name: v1, labels: {version: v1}}]
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  ports: [{name: http, port: 80}]
";

/// Runs `skysail up` in a folder of its own.
struct Tool(TempDir);

impl Tool {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("run")).unwrap();
        Self(folder)
    }

    fn put(&self, file: &str, text: &str) {
        let file = self.0.path().join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_skysail"));
        command.arg("up").args(arguments).current_dir(self.0.path());
        command.env("XDG_RUNTIME_DIR", self.0.path().join("run")).stdin(Stdio::null());
        command
    }

    /// Runs it to its end. Nothing of the mesh may remain.
    fn up(&self, arguments: &[&str], input: &str) -> Output {
        let mut command = self.command(arguments);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(input.as_bytes()).unwrap();
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        let left = fs::read_dir(self.0.path().join("run/skysail")).into_iter().flatten().map(Result::unwrap);
        let left: Vec<_> = left.filter(|entry| entry.path().is_dir()).collect();
        assert!(left.is_empty(), "{left:?}: {output:?}");
        output
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn rules_without_a_workload_are_checked_and_nothing_is_run() {
    let tool = Tool::new();
    tool.put("rules.yaml", RULES);
    let good = tool.up(&["rules.yaml"], "");
    assert_eq!(good.status.code(), Some(0), "{good:?}");
    assert_eq!(
        text(&good.stdout),
        "1 DestinationRule, 1 Service, 1 VirtualService checked: no errors. There is no workload to run: add a \
         Deployment or a Pod, or pass the folder that has them\n"
    );
    tool.put("rules.yaml", &RULES.replace("subset: v1", "subset: v2"));
    let bad = tool.up(&["rules.yaml"], "");
    assert_eq!(bad.status.code(), Some(1), "{bad:?}");
    let output = text(&bad.stdout);
    assert!(
        output.starts_with("error: ") && output.contains("rules.yaml:8: VirtualService shop/web: "),
        "{output}"
    );
    assert!(output.contains("checked: 1 error. There is no workload to run"), "{output}");
    let bad = tool.up(&["rules.yaml", "--output", "json"], "");
    assert_eq!(bad.status.code(), Some(1), "{bad:?}");
    let result: Value = serde_json::from_slice(&bad.stdout).unwrap();
    assert_eq!((&result["mesh"], &result["healthy"]), (&"rules".into(), &false.into()));
    assert_eq!(result["diagnostics"][0]["severity"], "error");
    assert_eq!(result["problems"].as_array().unwrap().len(), 1);
}

#[test]
fn standard_input_is_checked_like_files() {
    let tool = Tool::new();
    let bad = tool.up(&["-"], &RULES.replace("subset: v1", "subset: v2"));
    assert_eq!(bad.status.code(), Some(1), "{bad:?}");
    assert!(text(&bad.stdout).starts_with("error: -:8: VirtualService shop/web: "), "{bad:?}");
    for (input, expected) in [
        ("", "standard input is empty"),
        ("\n# nothing\n", "no workloads in standard input: 1 file with no object"),
        ("kind: [", "-:1: error: "),
    ] {
        let refused = tool.up(&["-"], input);
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        assert!(text(&refused.stderr).contains(expected), "{refused:?}");
    }
    let pty = openpty(None, None).unwrap();
    let refused = tool.command(&["-"]).stdin(pty.slave).output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(text(&refused.stderr).contains("standard input is a terminal"), "{refused:?}");
}

#[test]
fn standard_input_is_run() {
    let tool = Tool::new();
    // A diagnostic of the control plane, and one about pods.
    let found = "---
apiVersion: networking.istio.io/v1
kind: ProxyConfig
metadata: {name: x, namespace: shop}
spec: {image: {imageType: debug}}
---
apiVersion: batch/v1
kind: CronJob
metadata: {name: night, namespace: shop}
spec: {schedule: '0 0 * * *', jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: a, image: x}]}}}}}
";
    let shop = include_str!("shop.yaml");
    let gateway = format!("-:{}: ProxyConfig shop/x: ", shop.lines().count() + 5);
    let ran = tool.up(&["-", "--for", "10ms", "--output", "json"], &format!("{shop}{found}"));
    assert_eq!(ran.status.code(), Some(0), "{ran:?}");
    let stderr = text(&ran.stderr);
    for part in [
        "mesh mesh from standard input\n",
        &format!("warning: {gateway}"),
        "\n-:84: warning: CronJob shop/night: is not run",
    ] {
        assert!(stderr.contains(part), "{part:?}: {stderr}");
    }
    let result: Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(result["mesh"], "mesh");
    assert!(!result["pods"].as_array().unwrap().is_empty(), "{result}");
    let mut diagnostics = result["diagnostics"].as_array().unwrap().iter();
    assert!(diagnostics.any(|one| one["text"].as_str().unwrap().starts_with(&gateway)), "{result}");
    assert!(!format!("{stderr}{result}").contains("stdin.yaml"), "{stderr}{result}");
}

#[test]
fn an_object_that_two_paths_define_differently_is_reported_with_both_places() {
    let tool = Tool::new();
    let service = |labels: &str| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: more, namespace: shop, labels: {{{labels}}}}}\n\
             spec: {{selector: {{app: front}}, ports: [{{name: http, port: 80, targetPort: 8080}}]}}\n"
        )
    };
    tool.put("shop.yaml", include_str!("shop.yaml"));
    tool.put("one/a.yaml", &service("n: '1'"));
    tool.put("two/a.yaml", &format!("# Another one.\n{}", service("n: '2'")));
    tool.put("same/a.yaml", &service("n: '2'"));
    let ran = tool.up(&["shop.yaml", "one", "two", "same", "--for", "10ms", "--output", "json"], "");
    assert_eq!(ran.status.code(), Some(0), "{ran:?}");
    let stderr = text(&ran.stderr);
    let found: Vec<_> = stderr.lines().filter(|line| line.contains("defines the object again")).collect();
    let [line] = found[..] else { panic!("{stderr}") };
    let [start, end] =
        line.split("/one/a.yaml:1: Service shop/more: has no effect: ").collect::<Vec<_>>()[..]
    else {
        panic!("{line}")
    };
    assert!(
        start.starts_with("warning: ") && end.contains("/two/a.yaml:2 defines the object again"),
        "{line}"
    );
}

#[test]
fn folders_of_other_tools_are_refused_with_the_command_to_use() {
    let tool = Tool::new();
    tool.put("overlay/kustomization.yaml", "resources: [../base]\n");
    tool.put("chart/Chart.yaml", "apiVersion: v2\nname: shop\nversion: 0.1.0\n");
    tool.put("chart/templates/web.yaml", "kind: {{ .Values.kind }}\n");
    for (path, command) in [
        ("overlay", "kustomize build overlay | skysail up -"),
        ("chart", "helm template chart chart | skysail up -"),
        ("chart/templates/web.yaml", "helm template chart chart | skysail up -"),
    ] {
        let refused = tool.up(&[path], "");
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        assert!(text(&refused.stderr).contains(command), "{refused:?}");
    }
}

#[test]
fn a_burst_of_messages_is_grouped_and_kept() {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), include_str!("shop.yaml")).ready();
    let rule = |n: usize| {
        format!(
            "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: r-{n}, namespace: shop}}\n\
             spec: {{host: h-{n}, trafficPolicy: {{loadBalancer: {{simple: NEAREST}}}}}}\n"
        )
    };
    mesh.put("many.yaml", &(0..40).map(rule).collect::<String>());
    let (output, file) = mesh.wait("the burst is counted", |output| {
        let line = output.lines().find(|line| line.contains("37 more like this, the last: error: "));
        let line = line.ok_or_else(|| output.to_owned())?;
        let file = line.rsplit("(all are in ").next().unwrap().trim_end_matches(')');
        Ok((output.to_owned(), file.to_owned()))
    });
    let about =
        |text: &str| text.lines().filter(|line| line.starts_with("error: ") && line.contains("/r-")).count();
    assert_eq!(about(&output), 3, "{output}");
    eventually("the others are kept", || {
        let kept = fs::read_to_string(Path::new(&file)).unwrap();
        if about(&kept) == 37 { Ok(()) } else { Err(kept) }
    });
}
