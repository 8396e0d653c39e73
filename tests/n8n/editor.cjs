// Does in n8n's editor, in a real browser, what the READMEs' three steps say: makes the credentials, imports workflows
// from their files, publishes them. Those in SHIPPED are only imported, for a picture of each; those in COPIES are
// published too.
//
//   node tests/n8n/editor.cjs N8N_URL EMAIL PASSWORD API_KEY SHIPPED COPIES PICTURES
const { readdirSync } = require('node:fs');
const { basename, join } = require('node:path');
const { default: binary } = require('@sparticuz/chromium');
const { chromium, selectors } = require('playwright-core');

const [url, email, password, apiKey, shipped, copies, pictures] = process.argv.slice(2);
const filesIn = (folder) => readdirSync(folder).sort().map((name) => join(folder, name));

async function signIn(page) {
  await page.goto(`${url}/signin`);
  await page.locator('input[type=email]').fill(email);
  await page.locator('input[type=password]').fill(password);
  await page.keyboard.press('Enter');
  await page.waitForURL(/home/);
}

async function createCredential(page, type, name, ...values) {
  await page.goto(`${url}/home/credentials`);
  await page.getByRole('button', { name: 'Create credential' }).first().click();
  await page.keyboard.type(type);
  await page.getByText(type, { exact: true }).first().click();
  await page.getByRole('button', { name: 'Continue' }).click();
  const dialog = page.getByRole('dialog');
  await dialog.getByTestId('inline-edit-preview').click();
  await page.keyboard.press('Control+A');
  await page.keyboard.type(name);
  await page.keyboard.press('Enter');
  const fields = await dialog.getByTestId('parameter-input-field').all();
  for (const [index, value] of values.entries()) await fields[index].fill(value);
  const saved = page.waitForResponse((response) => response.request().method() === 'POST' && response.url().endsWith('/rest/credentials'));
  await dialog.getByRole('button', { name: 'Save' }).click();
  if (!(await saved).ok()) throw new Error('the credential was not saved');
}

async function importWorkflow(page, file) {
  await page.goto(`${url}/workflow/new`);
  await page.getByTestId('canvas-add-button').waitFor();
  await page.getByTestId('workflow-menu').first().click();
  await page.getByText('Import', { exact: true }).hover();
  const chosen = page.waitForEvent('filechooser');
  await page.getByText('From file').click();
  await (await chosen).setFiles(file);
  const drawn = page.getByTestId('canvas-node').or(page.getByTestId('sticky'));
  await drawn.nth(require(file).nodes.length - 1).waitFor();
  const issues = await page.getByTestId('node-issues').count();
  if (issues > 0) throw new Error(`${file}: n8n sees issues in ${issues} nodes`);
}

async function takePicture(page, file) {
  await page.getByTestId('zoom-to-fit').click();
  // A click beside the nodes unmarks them, and the pointer away shows no tool over one.
  await page.mouse.click(800, 120);
  await page.mouse.move(800, 850);
  await page.screenshot({ path: join(pictures, `${basename(file, '.json')}.png`), clip: { x: 42, y: 90, width: 1490, height: 710 } });
}

async function publish(page) {
  await page.getByTestId('workflow-open-publish-modal-button').click();
  await page.getByRole('dialog').getByRole('button', { name: 'Publish' }).click();
  await page.getByText('Published').first().waitFor();
}

(async () => {
  selectors.setTestIdAttribute('data-test-id');
  // Unpacked into the folder for temporary files. Without the last arguments it looks about for servers of its maker.
  const browser = await chromium.launch({
    executablePath: await binary.executablePath(),
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
  });
  const page = await browser.newPage({ viewport: { width: 1600, height: 900 } });
  page.setDefaultTimeout(20_000);
  try {
    await signIn(page);
    await createCredential(page, 'Header Auth', 'dedup-gate API key', 'X-API-Key', apiKey);
    await createCredential(page, 'Crypto', 'dedup-gate webhook secret', 'a secret of n8n, in 33 characters');
    for (const file of filesIn(shipped)) {
      await importWorkflow(page, file);
      await takePicture(page, file);
    }
    for (const file of filesIn(copies)) {
      await importWorkflow(page, file);
      await publish(page);
    }
  } catch (fault) {
    await page.screenshot({ path: join(pictures, 'fault.png') });
    console.error(`${fault.stack}\nsee ${join(pictures, 'fault.png')}`);
    process.exitCode = 1;
  } finally {
    await browser.close();
  }
})();
