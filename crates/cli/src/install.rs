//! `skysail install` and `skysail uninstall`: a control plane in a Kubernetes cluster.

use std::{
    io::{self, IsTerminal as _},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use clap::Parser as _;
use serde_json::json;
use skysail_core::stdio::{self, print_error};
use skysail_install::{
    Connection, InstallOptions, Installation, Installed, NotInTime, Object, Target, Validation, check_image,
    definitions, install, objects, uninstall,
};

use crate::{
    exit,
    image::{ImageNames, Program},
};

/// Arguments of `skysail install`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Before it changes anything, the command checks the version of the cluster, your permissions, whether another control \
plane is in the way, and each object (by a dry run in the API server). It can be repeated: objects that are equal stay \
as they are.

Examples:
  skysail install --image-registry registry.example/mesh
  skysail install --revision canary --replicas 3 -- --cert-ttl=12h
  skysail install --output yaml | kubectl apply --server-side -f -")]
pub(crate) struct InstallArgs {
    #[command(flatten)]
    place: TargetArgs,
    #[command(flatten)]
    names: ImageNames,
    /// Image of skysaild [default: REGISTRY/skysaild:TAG].
    #[arg(long, value_name = "IMAGE")]
    control_image: Option<String>,
    /// Image of skysail-proxy for injected pods [default: REGISTRY/skysail-proxy:TAG].
    #[arg(long, value_name = "IMAGE")]
    proxy_image: Option<String>,
    /// A CNI plugin on the nodes redirects connections, instead of an init container in each pod.
    #[arg(long)]
    cni: bool,
    /// What happens to objects of Istio, Gateway API and Skysail that are created or changed while no control plane
    /// answers. Otherwise the control plane validates them, and those of Istio and Skysail with errors are refused.
    #[arg(long, value_enum, default_value_t, value_name = "POLICY")]
    validation: ValidationPolicy,
    /// The control plane deploys no proxies for Gateways of Gateway API, and has no permission to create Deployments,
    /// Services and ServiceAccounts.
    #[arg(long)]
    no_gateway_deployments: bool,
    /// Number of replicas of the control plane [default: 1 to 5, by their CPU usage].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    replicas: Option<u32>,
    /// Make the checks, show what would change, and change nothing.
    #[arg(long, conflicts_with = "output")]
    dry_run: bool,
    /// Print the objects in this format, and do not access a cluster.
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<ObjectFormat>,
    /// Take over objects and fields of other programs.
    #[arg(long, conflicts_with = "output")]
    force: bool,
    /// Do not wait for the control plane to serve.
    #[arg(long)]
    no_wait: bool,
    /// Time for the control plane to serve.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = crate::up::duration)]
    timeout: Duration,
    /// Further options of skysaild; see `skysail control --help`.
    #[arg(last = true, value_name = "OPTION")]
    control_options: Vec<String>,
}

/// Arguments of `skysail uninstall`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The namespace, definitions of kinds (CRDs) and the objects of users stay. So do the certificate authority (Secret \
istio-ca-secret) and its root certificates (ConfigMaps istio-ca-root-cert), which a later installation uses again; \
--purge removes them.")]
pub(crate) struct UninstallArgs {
    #[command(flatten)]
    place: TargetArgs,
    /// Also remove the certificate authority and the root certificates in all namespaces. Running sidecars do not trust
    /// those of a later installation.
    #[arg(long)]
    purge: bool,
    /// Do not ask before the removal.
    #[arg(short, long)]
    yes: bool,
    /// Show what would be removed, and remove nothing.
    #[arg(long)]
    dry_run: bool,
    /// Time for the objects to end.
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = crate::up::duration)]
    timeout: Duration,
}

/// The cluster, and the place of the control plane in it.
#[derive(Debug, clap::Args)]
pub(crate) struct TargetArgs {
    /// Namespace of the control plane.
    #[arg(short, long, value_name = "NAMESPACE", default_value = "istio-system")]
    namespace: String,
    /// Revision of the control plane. Namespaces and pods choose one by the label `istio.io/rev`.
    #[arg(long, value_name = "REVISION", default_value = "default")]
    revision: String,
    /// File with the access to the cluster [default: that of KUBECONFIG, ~/.kube/config, the pod's service account].
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Context in this file [default: its current context].
    #[arg(long, value_name = "CONTEXT")]
    context: Option<String>,
}

/// Policy of the webhook for validation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum ValidationPolicy {
    /// They are accepted.
    #[default]
    Ignore,
    /// They are refused.
    Fail,
    /// There is no webhook for validation: all are accepted, and errors are in the log of the control plane.
    Off,
}

/// Format of the objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ObjectFormat {
    /// A document for each object, for `kubectl apply`.
    Yaml,
    /// A list (kind List).
    Json,
}

/// Options of skysaild, for their check.
#[derive(Debug, clap::Parser)]
#[command(name = "skysaild", disable_help_flag = true)]
struct ControlOptions {
    #[command(flatten)]
    control: skysail_control::Args,
}

impl TargetArgs {
    pub(crate) fn target(&self) -> anyhow::Result<Target> {
        Ok(Target::new(&self.namespace, &self.revision)?)
    }

    pub(crate) async fn connect(&self) -> anyhow::Result<Connection> {
        Connection::new(self.kubeconfig.as_deref(), self.context.as_deref()).await
    }
}

impl InstallArgs {
    fn installation(&self) -> anyhow::Result<Installation> {
        let image = |given: &Option<String>, program| match given {
            Some(image) => check_image(image).map(|()| image.clone()).map_err(anyhow::Error::from),
            None => self.names.of(program),
        };
        let mut installation = Installation {
            target: self.place.target()?,
            control_image: image(&self.control_image, Program::Skysaild)?,
            proxy_image: image(&self.proxy_image, Program::SkysailProxy)?,
            cni: self.cni,
            validation: match self.validation {
                ValidationPolicy::Ignore => Validation::Ignore,
                ValidationPolicy::Fail => Validation::Fail,
                ValidationPolicy::Off => Validation::Off,
            },
            deploys_gateways: !self.no_gateway_deployments,
            replicas: self.replicas,
            arguments: self.control_options.clone(),
            plain_port: None,
        };
        // All options, as repeated ones are refused, too.
        let options = installation.control_arguments();
        let parsed = ControlOptions::try_parse_from(std::iter::once("skysaild".to_owned()).chain(options));
        let parsed = parsed.map_err(|error| {
            let text = error.to_string();
            anyhow!("the options after `--`: {}", text.trim_start_matches("error: ").trim_end())
        })?;
        let args = parsed.control;
        for (name, port, expected) in [
            ("--tls-port", args.tls_port, skysail_core::names::DISCOVERY_TLS_PORT),
            ("--admin-port", args.admin_port, skysail_core::names::CONTROL_ADMIN_PORT),
        ] {
            if port != expected {
                bail!("the options after `--`: {name} must stay {expected}, as the Service leads there");
            }
        }
        installation.plain_port = args.plain_port;
        Ok(installation)
    }
}

/// Installs a control plane, or prints its objects.
pub(crate) fn run_install(args: &InstallArgs) -> anyhow::Result<u8> {
    let installation = args.installation()?;
    if let Some(format) = args.output {
        stdio::write(text(&objects(&installation), format)?.as_bytes())?;
        return Ok(exit::OK);
    }
    let are_local = args.names.are_local() && (args.control_image.is_none() || args.proxy_image.is_none());
    if are_local {
        print_error(
            "note: the images are not in a registry, so each node must have them; `skysail image` makes them, and \
             --image-registry names a registry",
        );
    }
    let options = InstallOptions {
        dry_run: args.dry_run,
        force: args.force,
        wait: (!args.no_wait).then_some(args.timeout),
    };
    let installed = runtime()?.block_on(async {
        let connection = args.place.connect().await?;
        install(&connection, &installation, options, &report).await
    });
    if let Some(code) = late(installed)? {
        return Ok(code);
    }
    if !args.dry_run {
        let label = match args.place.revision.as_str() {
            "default" => "istio-injection=enabled".to_owned(),
            revision => format!("istio.io/rev={revision}"),
        };
        report("installed; the pods of a namespace get sidecars when they are created after");
        report(&format!("  kubectl label namespace NAMESPACE {label}"));
    }
    Ok(exit::OK)
}

/// Prints the definitions of Skysail's own kinds.
pub(crate) fn print_definitions() -> anyhow::Result<u8> {
    stdio::write(text(&definitions(), ObjectFormat::Yaml)?.as_bytes())?;
    Ok(exit::OK)
}

/// Removes a control plane.
pub(crate) fn run_uninstall(args: &UninstallArgs) -> anyhow::Result<u8> {
    let target = args.place.target()?;
    runtime()?.block_on(async {
        let connection = args.place.connect().await?;
        let installed = Installed::find(&connection, &target, args.purge).await?;
        if installed.objects.is_empty() && installed.kept.is_empty() {
            report(&format!(
                "no revision {} of Skysail is installed in {}",
                target.revision, target.namespace
            ));
            return Ok(exit::OK);
        }
        report(&format!("to remove from {}:", connection.address()));
        for object in installed.objects.iter().chain(&installed.kept) {
            report(&format!("  {object}"));
        }
        for note in &installed.notes {
            report(&format!("note: {note}"));
        }
        if args.dry_run {
            report("nothing was removed (--dry-run)");
            return Ok(exit::OK);
        }
        if !args.yes && !is_confirmed()? {
            report("nothing was removed");
            return Ok(exit::BAD);
        }
        let uninstalled = uninstall(&connection, &installed, args.timeout, &report).await;
        Ok(late(uninstalled)?.unwrap_or_else(|| {
            report("uninstalled");
            exit::OK
        }))
    })
}

/// Returns the exit code of a command whose changes were accepted, and did not have their effect in time.
fn late(result: anyhow::Result<()>) -> anyhow::Result<Option<u8>> {
    let Err(error) = result else { return Ok(None) };
    if !error.is::<NotInTime>() {
        return Err(error);
    }
    print_error(format!("skysail: {error:#}"));
    Ok(Some(exit::BAD))
}

/// Asks the user.
fn is_confirmed() -> anyhow::Result<bool> {
    if !io::stdin().is_terminal() {
        bail!("nothing was removed: set --yes, as no terminal can be asked");
    }
    stdio::write(b"Remove them? [y/N] ")?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Shows a step. A reader that has left does not stop a change in the middle.
fn report(line: &str) {
    let _ = stdio::print(line);
}

pub(crate) fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")
}

/// Returns objects as text.
fn text(objects: &[Object], format: ObjectFormat) -> anyhow::Result<String> {
    Ok(match format {
        ObjectFormat::Yaml => {
            objects.iter().map(|object| format!("---\n{}", skysail_inject::yaml(object.value()))).collect()
        }
        ObjectFormat::Json => {
            let items: Vec<_> = objects.iter().map(Object::value).collect();
            let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
            serde_json::to_string_pretty(&list)? + "\n"
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Command {
        #[command(flatten)]
        install: InstallArgs,
    }

    fn installation(arguments: &[&str]) -> anyhow::Result<Installation> {
        Command::try_parse_from([&["install"], arguments].concat())?.install.installation()
    }

    #[test]
    fn options_of_the_control_plane_are_checked() {
        let installation = |arguments: &[&str]| installation(arguments).map_err(|error| error.to_string());
        let plain = installation(&["--", "--plain-port=15010", "--cert-ttl", "12h"]).unwrap();
        assert_eq!((plain.plain_port, plain.arguments.len()), (Some(15_010), 3));
        for (arguments, expected) in [
            (["--", "--cert-tll=12h"], "unexpected argument '--cert-tll'"),
            (["--", "--injection-revision=a"], "cannot be used multiple times"),
            (["--", "--tls-port=1"], "--tls-port must stay 15012"),
            (["--control-image", "A"], "\"A\" is no name of an image"),
            (["--image-tag", "a b"], "is no name of an image"),
            (["--revision", "A"], "\"A\" is no revision"),
        ] {
            let error = self::installation(&arguments).unwrap_err();
            assert!(format!("{error:#}").contains(expected), "{arguments:?}: {error:#}");
        }
    }
}
