// Uses the lab's page in a real browser, and prints what it has seen as JSON.
//
//   node tests/lab/page.cjs URL PICTURE LANGUAGE [API_KEY]
const { default: binary } = require('@sparticuz/chromium');
const { chromium } = require('playwright-core');

const [url, picture, locale, apiKey] = process.argv.slice(2);

(async () => {
  // Unpacked into the folder for temporary files. Without the last arguments it looks about for servers of its maker.
  const browser = await chromium.launch({
    executablePath: await binary.executablePath(),
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
  });
  try {
    const page = await browser.newPage({ viewport: { width: 960, height: 600 }, locale, reducedMotion: 'reduce' });
    page.setDefaultTimeout(20_000);
    const seen = { complaints: [] };
    page.on('console', (message) => message.type() === 'error' && seen.complaints.push(message.text()));
    page.on('pageerror', (fault) => seen.complaints.push(fault.message));
    const cards = ['unsafe', 'in_memory', 'idempotent'].map((id) => page.locator(`#${id}`));
    const all = (read) => Promise.all(cards.map(read));
    const texts = (selector) => all((card) => card.locator(selector).innerText());
    // All buttons are there again once the page has heard, and shown, everything.
    const settle = () => page.locator('#all:enabled').waitFor();
    const click = async (button) => {
      await button.click();
      await settle();
      return texts('.balance');
    };

    await page.goto(`${url}/lab`);
    await settle();
    seen.asks_for_key = await page.locator('[name=secret]').isVisible();
    if (apiKey) {
      await page.locator('[name=secret]').fill(apiKey);
      await page.locator('[name=secret]').press('Tab');
      await settle();
    }
    seen.lang = await page.locator('html').getAttribute('lang');
    seen.opening = await texts('.balance');
    seen.charged = await click(page.locator('#all'));
    seen.said = await texts('.said');
    seen.bar_names = await all((card) => card.getByRole('img').getAttribute('aria-label'));
    seen.bars = await all((card) => card.locator('.bar span').evaluateAll((shares) => {
      const whole = shares[0].parentElement.clientWidth;
      return shares.map((share) => (100 * share.getBoundingClientRect().width / whole).toFixed());
    }));
    await page.screenshot({ path: picture });
    seen.again = await click(cards[0].getByRole('button'));
    await page.locator('[name=account]').fill('acc-2');
    await page.locator('[name=account]').press('Tab');
    await settle();
    seen.other_account = await texts('.balance');
    const complaints = seen.complaints.length;
    await click(cards[2].getByRole('button'));
    seen.fault = await page.getByRole('alert').innerText();
    // The browser itself notes that a reply is none of success.
    seen.complaints.splice(complaints);
    seen.emptied = await click(page.locator('#reset'));
    await page.setViewportSize({ width: 360, height: 700 });
    seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
    console.log(JSON.stringify(seen));
  } finally {
    await browser.close();
  }
})().catch((fault) => {
  console.error(fault.stack);
  process.exitCode = 1;
});
