//! Volumes of pods: programs find them at their mount points, and this machine's files are not changed.

use std::path::Path;

use nix::{sys::signal::Signal, unistd::Uid};
use skysail_testkit::{Mesh, Setup, eventually};

const SETTINGS: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings, namespace: shop}\ndata: {greeting: hello, colour: red}\n";

/// Returns a Deployment `web` whose pods have these volumes, init containers and containers; the programs are this
/// machine's.
fn web(volumes: &str, others: &str, containers: &str) -> Setup {
    let text = format!(
        "{SETTINGS}---\napiVersion: v1\nkind: Secret\nmetadata: {{name: key, namespace: shop}}\ndata: {{pass: c2VjcmV0}}\nstringData: {{user: me}}\n---\n\
         apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: web, namespace: shop}}\nspec:\n  selector: {{matchLabels: {{app: web}}}}\n  template:\n    \
         metadata: {{labels: {{app: web}}}}\n    spec:\n      volumes:\n{volumes}{others}      containers:\n{containers}"
    );
    Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).with(&["--run-commands"])
}

/// Returns the output of a shell in the first container, or in this one.
fn sh(mesh: &Mesh, container: &[&str], script: &str) -> String {
    let output = mesh.run(&[&["exec", "web"], container, &["--", "sh", "-c", script]].concat());
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    text.trim().to_owned()
}

fn all_kinds() -> Setup {
    web(
        "      - {name: settings, configMap: {name: settings}}\n      - {name: one, configMap: {name: settings, items: [{key: colour, path: deep/paint, mode: 0444}]}}\n      \
         - {name: key, secret: {secretName: key, defaultMode: 0400}}\n      - {name: maybe, secret: {secretName: absent, optional: true}}\n      \
         - {name: scratch, emptyDir: {}}\n      - {name: small, emptyDir: {medium: Memory, sizeLimit: 1Mi}}\n      - name: info\n        projected:\n          sources:\n          \
         - serviceAccountToken: {path: token, audience: vault}\n          - downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}\n          \
         - secret: {name: key, items: [{key: user, path: user}]}\n",
        "      initContainers:\n      - name: prepare\n        image: busybox\n        command: [sh, -c, 'mkdir /skysail-data/sub && echo prepared > /skysail-data/sub/file']\n        \
         volumeMounts: [{name: scratch, mountPath: /skysail-data}]\n",
        "      - name: web\n        image: busybox\n        workingDir: /skysail-data\n        command: [sh, -c, 'pwd; exec sleep 100000']\n        \
         readinessProbe: {exec: {command: [test, -f, sub/file]}}\n        volumeMounts:\n        \
         - {name: settings, mountPath: /etc/skysail-test/config}\n        - {name: settings, mountPath: /usr/skysail-test/greeting.txt, subPath: greeting}\n        \
         - {name: settings, mountPath: /etc/passwd, subPath: colour}\n        - {name: one, mountPath: /skysail-one}\n        - {name: key, mountPath: /var/run/skysail-test}\n        - {name: maybe, mountPath: /skysail-maybe}\n        \
         - {name: scratch, mountPath: /skysail-data}\n        - {name: small, mountPath: /dev/shm}\n        - {name: info, mountPath: /skysail-data/info}\n      \
         - name: twin\n        image: busybox\n        command: [sh, -c, 'exec sleep 100000']\n        \
         volumeMounts: [{name: scratch, mountPath: /etc/skysail-test/config, subPath: sub, readOnly: true}]\n",
    )
}

fn programs_find_their_volumes(mesh: &Mesh) {
    let read = |script: &str| sh(mesh, &[], script);
    assert_eq!(read("cat /etc/skysail-test/config/greeting /usr/skysail-test/greeting.txt"), "hellohello");
    assert_eq!(
        read("ls /skysail-one; cat /skysail-one/deep/paint; stat -Lc %a /skysail-one/deep/paint"),
        "deep\nred444"
    );
    assert_eq!(read("cat /var/run/skysail-test/pass /var/run/skysail-test/user"), "secretme");
    assert_eq!(read("stat -Lc %a /var/run/skysail-test/pass"), "400");
    assert_eq!(read("ls /skysail-maybe; cat /etc/passwd"), "red");
    assert_eq!(read("cat /skysail-data/info/user"), "me");
    assert!(read("cat /skysail-data/info/labels").contains("app=\"web\""));
    assert_eq!(read("tr -cd . < /skysail-data/info/token | wc -c"), "2", "a JSON web token");
    assert!(read("echo x > /etc/skysail-test/config/x").contains("Read-only"));
    assert!(read("echo x > /etc/passwd").contains("Read-only"));
    assert!(read("head -c 3000000 /dev/zero > /dev/shm/big").contains("No space"));
    assert_eq!(read("cat /skysail-data/sub/file; echo written > /skysail-data/sub/more"), "prepared");
    // The rest of the machine and of the pod is unchanged.
    assert_eq!(
        read("head -n 1 /etc/resolv.conf; test -d /proc/self/fd && test -c /dev/null && echo there"),
        "nameserver 10.244.0.1\nthere"
    );
    let twin = |script: &str| sh(mesh, &["-c", "twin"], script);
    assert_eq!(twin("cat /etc/skysail-test/config/more"), "written");
    assert!(twin("touch /etc/skysail-test/config/x").contains("Read-only"));
    assert!(twin("ls /skysail-data").contains("No such file"));
    assert!(sh(mesh, &["-c", "wbe"], "true").contains("no container wbe that has started; it has"));
    let logs = mesh.run(&["logs", "web", "-c", "web"]);
    assert_eq!(String::from_utf8_lossy(&logs.stdout).lines().last(), Some("/skysail-data"));
    for path in ["/skysail-data", "/etc/skysail-test", "/usr/skysail-test", "/run/skysail-test"] {
        assert!(!Path::new(path).exists(), "{path} is on this machine");
    }
}

#[test]
fn volumes_of_all_kinds_are_mounted() {
    let mesh = all_kinds().ready();
    programs_find_their_volumes(&mesh);
    assert!(mesh.interrupt().status.success());
}

#[test]
fn an_ordinary_user_has_volumes() {
    let setup = all_kinds();
    let mesh = if Uid::effective().is_root() { setup.as_user(65534) } else { setup }.ready();
    programs_find_their_volumes(&mesh);
    assert!(mesh.interrupt().status.success());
}

#[test]
fn a_changed_object_changes_the_files_of_running_pods() {
    let mesh = web(
        "      - {name: settings, configMap: {name: settings}}\n",
        "",
        "      - name: web\n        image: busybox\n        command: [sh, -c, 'exec sleep 100000']\n        volumeMounts: [{name: settings, mountPath: /skysail-settings}, {name: settings, mountPath: /skysail-file, subPath: greeting}]\n",
    )
    .ready();
    let before = mesh.names("web");
    mesh.edit("mesh.yaml", "greeting: hello, colour: red", "greeting: good-day, size: big");
    let read = |script: &str| sh(&mesh, &[], script);
    eventually("the file is new", || match read("cat /skysail-settings/greeting") {
        text if text == "good-day" => Ok(()),
        text => Err(text),
    });
    assert_eq!(read("ls /skysail-settings"), "greeting\nsize");
    assert_eq!(read("cat /skysail-file"), "hello", "as in Kubernetes, what is mounted by subPath stays");
    // A restarted program gets the new one.
    let pod = mesh.status()["pods"][0].clone();
    let program =
        pod["programs"].as_array().unwrap().iter().find(|program| program["name"] == "web").unwrap().clone();
    assert_eq!(read(&format!("kill {}", program["process"])), "");
    eventually("it is started again", || match read("cat /skysail-file") {
        text if text == "good-day" => Ok(()),
        text => Err(text),
    });
    assert_eq!(mesh.names("web"), before);
    // Volumes keep the files of removed keys and objects.
    mesh.edit("mesh.yaml", "name: settings, namespace: shop", "name: others, namespace: shop");
    assert_eq!(read("cat /skysail-settings/greeting"), "good-day");
}

#[test]
fn a_pod_waits_for_the_objects_that_it_mounts() {
    let mesh = web(
        "      - {name: late, secret: {secretName: late}}\n",
        "",
        "      - name: web\n        image: busybox\n        command: [sh, -c, 'exec sleep 100000']\n        volumeMounts: [{name: late, mountPath: /skysail-late}]\n",
    )
    .start();
    mesh.wait_for_output(
        "Deployment shop/web: volume late: Secret shop/late does not exist; its pods wait for it",
    );
    eventually("the reason is in the status", || {
        let output = mesh.run(&["status"]);
        match String::from_utf8_lossy(&output.stdout).into_owned() {
            text if text.contains("ContainerCreating: volume late: Secret shop/late does not exist") => {
                Ok(())
            }
            text => Err(text),
        }
    });
    mesh.put(
        "late.yaml",
        "apiVersion: v1\nkind: Secret\nmetadata: {name: late, namespace: shop}\nstringData: {a: here}\n",
    );
    mesh.wait_ready();
    assert_eq!(sh(&mesh, &[], "cat /skysail-late/a"), "here");
    assert!(mesh.interrupt().status.success());
}

#[test]
fn a_symbolic_link_cannot_lead_out_of_its_volume() {
    let mut mesh = web(
        "      - {name: scratch, emptyDir: {}}\n",
        "      initContainers:\n      - {name: prepare, image: busybox, command: [sh, -c, 'ln -s / /skysail-data/out'], volumeMounts: [{name: scratch, mountPath: /skysail-data}]}\n",
        "      - {name: web, image: busybox, command: [sh, -c, 'exec sleep 100000'], volumeMounts: [{name: scratch, mountPath: /skysail-out, subPath: out/etc}]}\n",
    )
    .start();
    mesh.wait_for_output(
        "cannot mount volume scratch at /skysail-out: subPath out/etc leads out of the volume",
    );
    let folder = mesh.run_folder().join("config");
    mesh.signal(Signal::SIGINT);
    assert_eq!(mesh.ended().status.code(), Some(1));
    // The logs of an unhealthy mesh stay, and nothing else.
    let kept: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(kept, ["logs"]);
}

#[test]
fn claims_outlive_pods_and_stand_ins_have_no_volumes() {
    let text = "apiVersion: apps/v1\nkind: StatefulSet\nmetadata: {name: web, namespace: shop}\nspec:\n  replicas: 2\n  selector: {matchLabels: {app: web}}\n  \
        volumeClaimTemplates: [{metadata: {name: disk}, spec: {accessModes: [ReadWriteOnce]}}]\n  template:\n    metadata: {labels: {app: web}}\n    spec:\n      \
        containers:\n      - {name: web, image: busybox, command: [sh, -c, 'hostname >> /skysail-disk/names; exec sleep 100000'], volumeMounts: [{name: disk, mountPath: /skysail-disk}]}\n---\n\
        apiVersion: v1\nkind: Pod\nmetadata: {name: alone, namespace: shop}\nspec:\n  volumes: [{name: absent, configMap: {name: absent}}, {name: nfs, nfs: {server: s, path: /}}]\n  \
        containers: [{name: alone, image: acme/alone, volumeMounts: [{name: absent, mountPath: /skysail-a}, {name: nfs, mountPath: /skysail-b}]}]\n";
    let mut mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), text).with(&["--run-commands"]).ready();
    let output = mesh.output();
    assert!(output.contains("replaces PersistentVolumeClaim disk-web-0"), "{output}");
    assert!(!output.contains("absent") && !output.contains("nfs"), "{output}");
    // Another template makes other pods, with the same claims.
    mesh.edit("mesh.yaml", "labels: {app: web}", "labels: {app: web, round: two}");
    eventually("both pods have found what those before them wrote", || {
        let names = |pod: &str| {
            let output = mesh.run(&["exec", pod, "--", "cat", "/skysail-disk/names"]);
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        match (names("web-0"), names("web-1")) {
            (zero, one) if zero == "web-0\nweb-0\n" && one == "web-1\nweb-1\n" => Ok(()),
            names => Err(format!("{names:?}")),
        }
    });
    let folder = mesh.run_folder();
    mesh.signal(Signal::SIGINT);
    let ended = mesh.ended();
    assert!(ended.status.success(), "{ended:?}");
    assert_eq!(std::fs::read_dir(folder).unwrap().flatten().filter(|entry| entry.path().is_dir()).count(), 0);
}
