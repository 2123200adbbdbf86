//! Container images of the programs, and their installation in a Kubernetes cluster.
//!
//! [`Image`] is made from a program and the libraries that it loads, without a container engine. [`objects()`] returns
//! what an installation consists of. [`install()`] and [`uninstall()`] apply and remove these objects.
//! [`check_before`] and [`check_installed`] look for problems in a cluster.

mod changes;
mod check;
mod connection;
mod image;
mod install;
mod object;
mod objects;
mod preflight;
mod settings;
mod uninstall;
mod wait;

pub use self::{
    check::{Category, CheckResult, Verdict, check_before, check_installed},
    connection::Connection,
    image::{Image, ImageSpec},
    install::{InstallOptions, install},
    object::Object,
    objects::{definitions, objects},
    settings::{Installation, SettingsError, Target, Validation, check_image},
    uninstall::{Installed, uninstall},
    wait::NotInTime,
};
